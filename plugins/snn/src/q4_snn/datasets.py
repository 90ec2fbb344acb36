"""Spoken digits as spikes: the Spiking Heidelberg Digits, read by ``tonic``; the files are the user's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from q4_snn.sources import SpikeTimes
from q4core import CheckpointError, ConfigError, InputError, PluginError
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

__all__ = ["SHD"]

_SIZE = 700
_MICROSECOND = 1e-6


class SHD:
    """The Spiking Heidelberg Digits: spikes of 700 input neurons, and one of 20 labels, for each sample.

    Nothing is downloaded: the folder has ``SHD/shd_train.h5`` or ``SHD/shd_test.h5``, where tonic puts them.

    Args:
        folder: As tonic's ``save_to``.
        train: Whether the training samples, or those for tests.
        dt: Seconds of a step.

    Raises:
        CheckpointError: There is no such file, or it is none of SHD.
        ConfigError: dt is not legal.
        PluginError: tonic is not installed.

    Reference:
        Cramer, Stradmann, Schemmel and Zenke, The Heidelberg spiking data sets, 2020.
    """

    def __init__(self, folder: str | os.PathLike[str], *, train: bool = True, dt: float = 1e-3) -> None:
        if isinstance(dt, bool) or not isinstance(dt, (int, float)) or not 0 < dt < float("inf"):
            raise ConfigError("SHD", name="dt", rule="above 0 seconds", value=dt)
        path = Path(folder) / "SHD" / f"shd_{'train' if train else 'test'}.h5"
        if not path.is_file():
            hint = "Get it from https://zenkelab.org/datasets, or by tonic.datasets.SHD."
            raise CheckpointError("SHD", name="file", rule="there", value="none", where=str(path), hint=hint)
        try:
            from tonic import datasets  # noqa: PLC0415  # an extra
        except ImportError as error:
            hint = 'pip install "q4-snn[shd]"'
            raise PluginError("SHD", name="package tonic", rule="installed", value=str(error), hint=hint) from error

        class Local(datasets.SHD):  # type: ignore[misc]  # tonic's classes have no types
            """tonic's reader over a file that is there, whose archive need not be."""

            def _check_exists(self) -> bool:
                return True

        Local.__name__ = "SHD"  # the folder's name
        self.dt, self.path = float(dt), path
        try:
            self._data: Any = Local(save_to=str(folder), train=train)
            self._count = len(self._data)
        except PLUGIN_FAULTS as error:  # HDF5's, of any file
            rule = "one of SHD"
            raise CheckpointError(
                "SHD", name="file", rule=rule, value=describe_exception(error), where=str(path)
            ) from error

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    @property
    def classes(self) -> list[str]:
        """What each label stands for."""
        return [key.decode() if isinstance(key, bytes) else str(key) for key in self._data.classes]

    def batch(self, indices: Sequence[int]) -> tuple[SpikeTimes, torch.Tensor]:
        """Return some samples as a source of spikes [B, 700] a step, and their labels int64 [B].

        Args:
            indices: Which, 0 or more each.

        Raises:
            InputError: There is no such sample, or none is asked for.
            CheckpointError: A spike is of no neuron, or at no time.
        """
        if not len(indices) or not all(0 <= index < self._count for index in indices):
            rule = f"some of 0 … {self._count - 1}"
            raise InputError("SHD", name="indices", rule=rule, value=[*indices])
        samples = [self._data[index] for index in indices]
        try:
            source = SpikeTimes(
                _SIZE,
                [events["t"] * _MICROSECOND for events, _ in samples],
                [events["x"] for events, _ in samples],
                dt=self.dt,
            )
        except ConfigError as error:
            raise CheckpointError(
                "SHD", name=error.name, rule=error.rule, value=error.value, where=str(self.path)
            ) from error
        return source, torch.tensor([int(label) for _, label in samples])

"""``q4 prepare`` and ``q4 cache``: preparation of models ahead of time; listing, removal and verification."""

from __future__ import annotations

import datetime as dt
import json
import time
from typing import TYPE_CHECKING, Any

import typer

import q4core as q4
from q4_lm.commands.generate import config_of, find_model
from q4_lm.commands.progress import loading_shown, progress
from q4_lm.generation.language_model import LanguageModel
from q4_lm.prepared.container import Container
from q4_lm.prepared.store import ABANDONED, Store, open_store, parse_size
from q4core.plugin_api import Proofs, counted, describe_exception

if TYPE_CHECKING:
    from q4_lm.prepared.store import Entry

__all__ = ["list_", "prepare", "prune", "verify"]

_DAMAGED = 2


def prepare(  # noqa: PLR0913  # one argument per option
    file: str,
    *,
    device: str | None,
    backend: str | None,
    compute_path: str | None,
    precision: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Prepare a model and store it in the cache, so that it opens at once under the same options."""
    path, store = find_model(file), _store()
    started = time.perf_counter()
    config = config_of(device, backend, compute_path, precision, dtype)
    with loading_shown(), LanguageModel.open(path, config) as model:
        cached = model.cached
        if cached is None or cached.state not in {"opened", "written"}:
            why = "there is no cache" if cached is None else cached.state
            raise q4.LifecycleError(
                f"q4 prepare: {path} is not cached: {why}", hint="It is prepared each time it opens."
            )
        found = next((entry for entry in store.entries() if entry.path == cached.path), None)
        if found is None:
            raise q4.LifecycleError(f"q4 prepare: {cached.path} was removed meanwhile", hint="Prepare it again.")
    seconds = time.perf_counter() - started
    if as_json:
        typer.echo(
            json.dumps({"file": str(path), "state": cached.state, "seconds": seconds, **_plain(found)}, indent=2)
        )
        return
    words = {"written": "prepared", "opened": "was prepared before"}
    typer.echo(f"{path} {words[cached.state]}: {found.nbytes / 1e6:,.0f} MB in {found.path} ({seconds:.2f} s)")


def list_(*, as_json: bool) -> None:
    """List the prepared models, the last used ones first."""
    store = _store()
    files = [_described(entry) for entry in store.entries()]
    if as_json:
        typer.echo(json.dumps({**_of(store), "files": files}, indent=2))
        return
    for item in files:
        typer.echo(
            f"{item['used']}  {item['bytes'] / 1e6:>8,.0f} MB  {item['name']}  {item['source'] or item['fault']}"
        )
    total = sum(item["bytes"] for item in files)
    size = f"{total / 1e6:,.0f} of {store.limit_bytes / 1e6:,.0f} MB"
    typer.echo(f"{counted(len(files), 'file')}, {size}, in {store.folder}")


def prune(*, limit: str, as_json: bool) -> None:
    """Remove what killed writers left, and the least recently used models; processes that have one open keep it."""
    store = _store()
    limit_bytes = parse_size("--limit", limit)
    removed = store.prune(limit_bytes)
    stored = Proofs.here(q4.default_registry()) if not limit_bytes else None
    proofs = 0 if stored is None else stored.forget()
    if as_json:
        names = [_plain(entry) for entry in removed]
        typer.echo(json.dumps({**_of(store), "removed": names, "proof_files_removed": proofs}, indent=2))
        return
    size = f"{sum(entry.nbytes for entry in removed) / 1e6:,.0f} MB"
    more = f", and {counted(proofs, 'file')} of proofs" if proofs else ""
    typer.echo(f"removed {counted(len(removed), 'file')}, {size}{more}")


def verify(*, as_json: bool) -> None:
    """Read every prepared model whole, and compare it with the digests that were written with it."""
    store = _store()
    files = [{**_described(entry), "fault": _fault(entry)} for entry in store.entries() if entry.unfinished is None]
    faulty = [item for item in files if item["fault"]]
    if as_json:
        typer.echo(json.dumps({**_of(store), "files": files}, indent=2))
    else:
        for item in faulty:
            typer.echo(f"{item['name']}: {item['fault']}")
        hint = "; `q4 cache prune --limit 0` removes all" if faulty else ""
        typer.echo(f"{counted(len(files), 'file')}, {len(faulty)} damaged{hint}")
    if faulty:
        raise typer.Exit(_DAMAGED)


def _store() -> Store:
    store = open_store()
    if store is None:
        what, hint = "there is no cache: Q4_CACHE is 'off'", "Unset Q4_CACHE, or let it name a folder."
        raise q4.ConfigError(what, hint=hint)
    if store.folder.exists() and not store.folder.is_dir():
        raise q4.ConfigError("cache", name="Q4_CACHE", rule="'off' or a folder", value=str(store.folder))
    return store


def _of(store: Store) -> dict[str, Any]:
    return {"folder": str(store.folder), "limit_bytes": store.limit_bytes}


def _plain(entry: Entry) -> dict[str, Any]:
    used = dt.datetime.fromtimestamp(entry.used, tz=dt.timezone.utc).isoformat(timespec="seconds")
    return {"path": str(entry.path), "name": entry.path.name, "bytes": entry.nbytes, "used": used}


def _described(entry: Entry) -> dict[str, Any]:
    """Return the description of a file: its model, or what is wrong with it."""
    if entry.unfinished is not None:
        way = "; `q4 cache prune` removes it" if entry.unfinished == ABANDONED else ""
        return {**_plain(entry), "source": None, "options": None, "fault": f"unfinished: {entry.unfinished}{way}"}
    try:
        facts = Container(entry.path).header["facts"]
        return {**_plain(entry), "source": facts["source"][0][0], "options": facts["options"], "fault": None}
    except (q4.CheckpointError, OSError, KeyError, TypeError, ValueError, IndexError) as error:
        return {**_plain(entry), "source": None, "options": None, "fault": describe_exception(error)}


def _fault(entry: Entry) -> str | None:
    try:
        with progress(f"verifying {entry.path.name[:16]}") as watch:
            wrong = Container(entry.path).verify(watch)
    except (q4.CheckpointError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        return describe_exception(error)
    return f"{counted(len(wrong), 'tensor')} damaged, the first is number {wrong[0]}" if wrong else None

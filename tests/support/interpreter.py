"""Python processes that tests run, forked from one that has imported torch: each starts in a tenth of the time.

Apart from that import they are fresh: their own arguments, variables, folder, standard streams and ``__main__``, and an
exit of their own. What must be measured from an interpreter's start on is run by ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["run_interpreter"]

_READ_AT_START = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "ATEN_")
"""How variables begin that an interpreter, or torch's libraries, read before any code of ours runs."""
_HANDLED = frozenset({"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"})
"""Of these, what the forked process heeds itself, and what does not matter where streams are read at the end."""
_WARNINGS = ("ignore", "error")
_MESSAGE_BYTES = 1 << 17


def run_interpreter(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run Python as ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True, …)`` does.

    Raises:
        subprocess.CalledProcessError: With ``check``, its exit status is not 0.
        subprocess.TimeoutExpired: It took longer, and was killed.
    """
    command = [sys.executable, *map(str, arguments)]
    variables = dict(os.environ if env is None else env)
    server, started_with = _server(os.getpid())
    if not _is_forkable(command[1:], variables, started_with):
        return subprocess.run(
            command, env=variables, cwd=cwd, timeout=timeout, check=check, capture_output=True, text=True
        )
    request = {"arguments": command[1:], "variables": variables, "folder": os.fspath(cwd or Path.cwd())}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, Path(os.devnull).open("rb") as none:
        socket.send_fds(server, [json.dumps(request).encode()], [none.fileno(), out.fileno(), err.fileno()])
        status = _wait(server, command, timeout)
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode().replace("\r\n", "\n"))
    if check and status:
        raise subprocess.CalledProcessError(status, command, *printed)
    return subprocess.CompletedProcess(command, status, *printed)


def _wait(server: socket.socket, command: list[str], timeout: float | None) -> int:
    try:
        pid = _number(server, "pid")
        server.settimeout(timeout)
        try:
            return _number(server, "status")
        except TimeoutError:
            os.kill(pid, 9)
            server.settimeout(None)
            _number(server, "status")
            raise subprocess.TimeoutExpired(command, timeout or 0.0) from None
        finally:
            server.settimeout(None)
    except subprocess.TimeoutExpired:
        raise
    except BaseException:  # what it still sends would be taken for the next request's
        server.close()
        _server.cache_clear()
        raise


def _number(server: socket.socket, what: str) -> int:
    """Return what the server says next, which must be of this kind."""
    kind, _, number = server.recv(_MESSAGE_BYTES).decode().partition(" ")
    assert kind == what, f"the server of interpreters sent {kind!r} for {what!r}"
    return int(number)


def _is_forkable(arguments: Sequence[str], variables: Mapping[str, str], started_with: Mapping[str, str]) -> bool:
    """Return whether a process differs from its server in nothing that is read before the program runs."""
    rest = arguments[2:] if [*arguments[:2]] in [["-W", action] for action in _WARNINGS] else arguments
    is_plain = bool(rest) and (rest[0] in {"-c", "-m"} or not rest[0].startswith("-"))
    early = {name for name in {*variables, *started_with} if name.startswith(_READ_AT_START)} - _HANDLED
    is_alike = all(variables.get(name) == started_with.get(name) for name in early)
    folders = variables.get("PYTHONPATH", "").split(os.pathsep)
    return is_plain and is_alike and not any(Path(folder, "sitecustomize.py").exists() for folder in folders if folder)


@functools.cache
def _server(pid: int) -> tuple[socket.socket, Mapping[str, str]]:
    """Return the connection to this process's server, and its variables; a process that was forked starts its own."""
    del pid
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, __file__, str(theirs.fileno())]
    silent = subprocess.DEVNULL
    server = subprocess.Popen(
        command, env=variables, pass_fds=[theirs.fileno()], stdin=silent, stdout=silent, stderr=silent
    )
    theirs.close()

    def end() -> None:
        with contextlib.suppress(OSError):  # it is closed already
            ours.shutdown(socket.SHUT_RDWR)  # also for forks of this process, which hold it open
        ours.close()
        server.wait()

    atexit.register(end)
    return ours, variables


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request; return the request in that process, and None at the end of the requests."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if not message:
            return None
        if (pid := os.fork()) == 0:
            connection.close()
            for place, file in enumerate(files):
                os.dup2(file, place)
                os.close(file)
            return json.loads(message)  # type: ignore[no-any-return]  # a request
        for file in files:
            os.close(file)
        connection.send(f"pid {pid}".encode())
        connection.send(f"status {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}".encode())


def _become(request: dict[str, Any], base: Sequence[str]) -> None:
    """Run a request's program as an interpreter does that was started for it."""
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    arguments = request["arguments"]
    if arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])
        arguments = arguments[2:]
    kind, name = arguments[0], arguments[1] if arguments[0] in {"-c", "-m"} else arguments[0]
    sys.argv = ["-c", *arguments[2:]] if kind == "-c" else [name, *arguments[1 if kind == name else 2 :]]
    first = {"-c": "", "-m": str(Path.cwd())}.get(kind, str(Path(name).resolve().parent))
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *map(os.path.abspath, given), *base]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if kind != "-c":
        main.__file__ = name
    code = name if kind == "-c" else Path(name).read_text(encoding="utf-8")
    exec(compile(code, "<string>" if kind == "-c" else name, "exec"), main.__dict__)  # noqa: S102  # a test's program


if __name__ == "__main__":
    import torch  # noqa: F401  # what every process would take a second for

    gc.freeze()  # nor does each process look through it at its end
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        _become(asked, sys.path[1:])

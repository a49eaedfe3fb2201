"""The package as it is installed: nothing missing from the wheel, nothing heavy imported, one name for every module."""

from __future__ import annotations

import ast
import fnmatch
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("runtime", "convert", "placement")
TOP_FOLDERS = {*SOURCES, "tests", "scripts", ".ci"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
CUPY = {"cupy", "cupy_backends", "cupyx"}


def package_name(folder: Path) -> str:
    return ".".join(("hotcold", *folder.relative_to(ROOT).parts))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from the working tree, unpacked into a folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: setuptools would reuse what an earlier build left in build/
    source.mkdir()
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--no-build-isolation", "--wheel-dir", str(folder), str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unpacked = folder / "unpacked"
    (built,) = folder.glob("hotcold-*.whl")
    zipfile.ZipFile(built).extractall(unpacked)
    return unpacked


def run_from(wheel: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the unpacked wheel as the only source of hotcold, from a folder outside the checkout."""
    # An editable install is found through site-packages, after PYTHONPATH.
    env = {**os.environ, "PYTHONPATH": str(wheel)}
    return subprocess.run([sys.executable, "-c", code], cwd=wheel, env=env, capture_output=True, text=True)


def test_every_package_on_disk_is_listed():
    on_disk = {package_name(init.parent) for top in SOURCES for init in (ROOT / top).rglob("__init__.py")}
    assert set(SETUPTOOLS["packages"]) == on_disk


def test_every_module_lies_in_a_package():
    for top in SOURCES:
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} has modules but no __init__.py"


def test_data_files_are_in_package_data():
    listed = SETUPTOOLS.get("package-data", {})
    for top in SOURCES:
        for path in (ROOT / top).rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc"):
                continue
            owner = next(p for p in path.parents if (p / "__init__.py").exists())
            patterns = listed.get(package_name(owner), []) + listed.get("*", [])
            inside = str(path.relative_to(owner))
            assert any(fnmatch.fnmatch(inside, pattern) for pattern in patterns), f"{path} would miss from the wheel"


def test_wheel_holds_every_source_file(wheel):
    for top in SOURCES:
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (wheel / "hotcold" / path.relative_to(ROOT)).exists(), f"{path} is not in the wheel"
    assert not list(wheel.glob("hotcold/tests*")), "tests do not belong into the wheel"


def test_wheel_imports_and_its_command_answers(wheel):
    done = run_from(wheel, "import hotcold.runtime, hotcold.convert, hotcold.placement as p; print(p.__file__)")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(wheel)
    code = "import sys; sys.argv = ['hotcold', '--help']; from hotcold.runtime.cli import main; sys.exit(main())"
    done = run_from(wheel, code)
    assert done.returncode == 0, done.stderr
    for command in ("convert", "run", "chat", "inspect"):
        assert command in done.stdout


def test_product_imports_no_deep_learning_framework(wheel):
    modules = [
        ".".join(("hotcold", *path.relative_to(ROOT).with_suffix("").parts))
        for top in SOURCES
        for path in sorted((ROOT / top).rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py")
    ]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print({'torch', 'transformers', 'tensorflow', 'jax', 'llama_cpp'} & set(sys.modules) or 'none')"
    )
    done = run_from(wheel, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "none"


def names_in(path: Path) -> set[str]:
    """What a module imports, and its strings, of which importlib may import one: "cupy.cuda" as "cupy"."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name.split(".")[0] for name in found}


def test_few_modules_know_cupy():
    modules = [path for top in SOURCES for path in (ROOT / top).rglob("*.py")]
    know = {str(path.relative_to(ROOT)) for path in modules if names_in(path) & CUPY}
    assert know == {f"runtime/gpu/{name}.py" for name in ("cards", "cublas", "cupy_device", "nvrtc")}


def test_extras_that_go_together_have_packages_of_one_cuda():
    extras = PROJECT["project"]["optional-dependencies"]
    cuda = {name for name, packages in extras.items() if any(p.startswith(("cupy", "nvidia")) for p in packages)}
    assert cuda == {"gpu", "gpu-cuda13", "compile"}  # CuPy cannot be installed for two CUDAs


@pytest.mark.parametrize("statement", ["import runtime", "from convert import names", "import placement"])
def test_bare_imports_are_banned(statement):
    file = str(ROOT / "tests" / "x.py")
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename", file, "-"]
    done = subprocess.run(command, input=statement + "\n", capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "TID251" in done.stdout


def test_top_level_folders_are_the_agreed_ones():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:  # an unpacked source archive has no index
        pytest.skip("not a git checkout")
    folders = {line.split("/")[0] for line in listed.stdout.splitlines() if "/" in line}
    assert folders <= TOP_FOLDERS

"""What a clone brings along: no machine's own paths, no large files, no remote code; documented, readable files."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BINARY = (".parquet", ".safetensors", ".png", ".pdf", ".model", ".whl")
LARGE = 2 * 2**20
SHORT = 12  # lines; a shorter function may speak for itself, and the module speaks for a program's run()
MODEL = "results/debian_tiny/model/"
PAGE = "results/debian_report/report.html"  # opens offline, so plotly's 5 MB are in it


def tracked() -> list[Path]:
    """The files of the repository; in an export without git, every file that is no product of a run."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    products = {"runs", "multirun", "wandb", "build", "dist", "__pycache__"}
    found = (path for path in ROOT.rglob("*") if path.is_file())
    return [
        path
        for path in found
        if not any(
            part in products
            or part.endswith(".egg-info")
            or (part.startswith(".") and part not in (".ci", ".gitignore"))
            for part in path.relative_to(ROOT).parts
        )
    ]


FILES = tracked()
TEXTS = [path for path in FILES if path.suffix not in BINARY and not str(path.relative_to(ROOT)).startswith(MODEL)]
CODE = [path for path in FILES if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests"]


def test_no_large_files() -> None:
    large = [str(path.relative_to(ROOT)) for path in FILES if path.stat().st_size > LARGE]
    assert [name for name in large if not name.startswith(MODEL) and name != PAGE] == []
    assert all((ROOT / name).stat().st_size < 3 * LARGE for name in large if name == PAGE)


def test_no_paths_of_one_machine() -> None:
    pattern = re.compile("/" + "(?:" + "|".join(["work", "tmp", "root", "farm"]) + ")/")
    assert [str(path.relative_to(ROOT)) for path in TEXTS if pattern.search(path.read_text("utf-8"))] == []


def test_no_remote_code_and_no_pickle_loading() -> None:
    remote = re.compile(r"trust_remote_code\s*=\s*True|weights_only\s*=\s*False|\bpickle\.loads?\(")
    assert [str(path.relative_to(ROOT)) for path in CODE if remote.search(path.read_text("utf-8"))] == []


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_public_names_say_what_they_are_for(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    if path.name != "__init__.py" or tree.body:
        assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and node.name != "run":
            lines = (node.end_lineno or node.lineno) - node.lineno
            assert lines < SHORT or ast.get_docstring(node), f"{node.name}: {lines} lines and no docstring"


def test_the_pins_satisfy_the_declared_dependencies() -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints" / "cpu-py311.txt").read_text("utf-8").splitlines()
    pinned = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pinned[re.sub(r"[-_.]+", "-", name).lower()] = version
    assert pinned["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    for requirement in map(Requirement, wanted):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name != "calm-t5":
            assert name in pinned, f"{name} is not pinned"
            assert requirement.specifier.contains(pinned[name]), (
                f"{name}=={pinned[name]} is not {requirement.specifier}"
            )


def test_the_readme_names_commands_and_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for module in re.findall(r"python -m ([a-z_0-9.]+)", text):
        base = ROOT.joinpath(*module.split("."))
        assert base.with_suffix(".py").is_file() or (base / "__main__.py").is_file() or module in ("venv", "pip"), (
            module
        )
    for choice in re.findall(r"(?<!\S)\+?(model|data|experiment)=([a-z_0-9]+)", text):
        assert (ROOT / "conf" / choice[0] / f"{choice[1]}.yaml").is_file() or choice[1] == "mine", "=".join(choice)

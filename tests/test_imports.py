"""Who may import whom, and through which door each heavy library comes in."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARROWS = {
    "calm": {"calm"},
    "train": {"train", "calm"},
    "serve": {"serve", "calm"},
    "eval": {"eval", "calm", "serve"},
}
BORDER = ("calm/cli.py", "calm/cli_errors.py", "calm/overrides.py", "calm/config.py")
DOORS = {
    "wandb": ("calm/tracking.py", "calm/tracking_upload.py"),
    "wandb_workspaces": ("calm/tracking_upload.py",),
    "datasets": ("calm/data/", "eval/rouge_module.py"),  # a metric module of evaluate declares its columns with it
    "accelerate": ("train/", "eval/"),
    "matplotlib": ("calm/plotting.py", "calm/report_plots/panels.py"),
    "plotly": ("calm/report_plots/interactive.py", "eval/report/page.py"),
    "evaluate": ("eval/",),
    "sacrebleu": ("eval/bleu.py",),
    "fastapi": ("serve/http/",),
    "starlette": ("serve/http/",),
    "pydantic": ("serve/http/",),
    "uvicorn": ("serve/http/",),
    "prometheus_client": ("serve/http/",),
    "h11": ("serve/http/connection.py", "eval/load_client.py", "eval/load_connection.py"),
    "peft": ("train/lora.py",),
    "gguf": ("calm/models/gguf_file.py",),
    "hydra": BORDER,
    "omegaconf": BORDER,
}
HEAVY = ("hydra", "omegaconf", "datasets", "evaluate", "wandb", "matplotlib")  # transformers brings accelerate
SOURCES = sorted(path for package in ARROWS for path in (ROOT / package).rglob("*.py"))


def imported(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Absolute dotted names that a file imports, wherever the import stands; relative ones resolved."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join([*base, node.module or ""])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield from (each.value for each in node.args[:1] if isinstance(each, ast.Constant))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows_and_use_the_doors(path: Path) -> None:
    where = str(path.relative_to(ROOT))
    for name in imported(path):
        top = name.split(".")[0]
        if top in {*ARROWS, "tests", "conf"}:
            assert top in ARROWS[path.relative_to(ROOT).parts[0]], f"{where} imports {name}"
        if top in DOORS:
            assert where.startswith(DOORS[top]), f"{where} imports {name}; only {DOORS[top]} may"


@pytest.mark.parametrize("package", ["train", "serve", "eval"])
def test_programs_import_their_own_package_relatively(package: str) -> None:
    """So a stranger's `train` in the working directory is never mixed into ours."""
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert package not in {name.split(".")[0] for name in names}, f"{path.name} imports {package} absolutely"


def test_the_door_check_sees_every_form_of_import(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    lines = ["import a.b", "from c import d", "importlib.import_module('e.f')", "import_module('g')", "from . import h"]
    file.write_text("\n".join(lines))
    assert set(imported(file, tmp_path)) == {"a.b", "c", "e.f", "g", ""}


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after running the code."""
    program = f"{code}\nimport sys; print(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_the_package_and_the_border_load_no_tensor_library() -> None:
    loaded = loaded_after("import calm, calm.cli, calm.config, train.__main__, eval.table1, eval.calibrate")
    assert not loaded & {"torch", "transformers", "numpy", *HEAVY}


def test_the_process_that_speaks_http_loads_no_tensor_library() -> None:
    loaded = loaded_after("import serve.__main__, serve.remote, serve.http.server")
    assert {"uvicorn", "fastapi"} <= loaded
    assert not loaded & {"torch", "transformers", *HEAVY}


def test_the_core_needs_neither_hydra_nor_the_dataset_and_tracking_libraries() -> None:
    names = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in sorted((ROOT / "calm").rglob("*.py"))
        if path.name != "plotting.py"
    ]
    loaded = loaded_after("\n".join(f"import {name}" for name in names))
    assert {"calm", "torch"} <= loaded
    assert not loaded & set(HEAVY)


def test_public_names_load_on_first_use_and_others_are_refused() -> None:
    import calm

    assert set(calm.__all__) <= set(dir(calm))
    for name in calm.__all__:
        assert getattr(calm, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_sort"):
        calm.nothing_of_the_sort  # noqa: B018

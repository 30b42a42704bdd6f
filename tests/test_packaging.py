"""The wheel holds the five packages and every YAML, nothing else, and runs where no checkout is near."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = {"calm", "train", "serve", "eval", "conf"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout with what the development extras bring: no build environment is fetched."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that holds the wheel alone."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def test_the_wheel_holds_five_packages_and_every_yaml(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    shipped = {name for name in names if name.endswith(".yaml")}
    assert shipped == {str(path.relative_to(ROOT)) for path in sorted((ROOT / "conf").rglob("*.yaml"))}
    assert any(name.endswith("LICENSE") for name in names)
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "serve" / "http" / "page").iterdir()}
    assert page <= set(names)


@pytest.mark.parametrize("form", ["module", "script"])
def test_the_wheel_runs_from_an_empty_folder(form: str, installed: Path, tmp_path: Path) -> None:
    start = [sys.executable, "-m", "train"] if form == "module" else [sys.executable, str(installed / "bin/calm-train")]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = subprocess.run(
        [sys.executable, "-c", "import calm.config; print(calm.config.CONF_DIR)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.strip() == str(installed / "conf")
    done = subprocess.run(
        [*start, "+model=tiny", "--cfg", "job"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["model"]["name"] == "tiny"
    assert list(tmp_path.iterdir()) == []

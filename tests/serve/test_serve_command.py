"""The server's command line: names, limits, what it refuses in one line, and what it never holds."""

from dataclasses import fields
from pathlib import Path

import pytest

from calm.cli import settings
from calm.errors import ConfigError
from calm.serve_config import NAME, ServeConfig, served_name
from tests.conftest import RunProgram


def config_of(*argv: str) -> ServeConfig:
    return settings("serve", ServeConfig, argv)


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("runs/demo/model", "demo"),
        ("models/mine-2.1", "mine-2.1"),
        ("some/my model (1)", "my-model--1-"),
        ("/", "model"),
    ],
)
def test_a_model_is_called_by_its_folder(checkpoint: str, name: str) -> None:
    found = served_name(config_of(f"checkpoint={checkpoint}"))
    assert found == name and NAME.fullmatch(found)
    assert served_name(config_of(f"checkpoint={checkpoint}", "name=other")) == "other"


def test_the_key_is_no_setting() -> None:
    """Fault 38: a command line is for everybody to read."""
    assert not [field.name for field in fields(ServeConfig) if "key" in field.name and field.name != "api_key_file"]
    with pytest.raises(ConfigError, match="api_key_file"):
        config_of("api_key=secret")


def test_limits_are_settings_and_checked() -> None:
    config = config_of("limits.max_n=3", "limits.connections=9", "allowed_hosts=[a.example,b.example]", "drain_s=0")
    assert (config.limits.max_n, config.limits.connections) == (3, 9)
    assert config.allowed_hosts == ["a.example", "b.example"]
    for argv, said in (("limits.max_n=0", "limits.max_n"), ("limits.max_stops=17", "limits.max_stops")):
        with pytest.raises(ConfigError, match=said):
            config_of(argv)


def test_the_home_folder_is_found_in_paths() -> None:
    assert config_of("api_key_file=~/key").api_key_file == str(Path.home() / "key")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give checkpoint=FOLDER|checkpoint=FOLDER"),
        (["checkpoint=no/such"], "checkpoint=no/such"),
        (["checkpoint=.", "api_key_file=no/such"], "api_key_file=no/such"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_status_one(
    run_program: RunProgram, argv: list[str], said: str
) -> None:
    done = run_program("serve", *argv)
    assert done.returncode == 1 and done.stdout == ""
    line = done.stderr.strip()
    assert any(words in line for words in said.split("|")) and "\n" not in line and line.startswith("error: ")

"""Starts one worker. By path (``python eval/peer_workers NAME``) the folder becomes the package ``peer_workers``."""

import importlib
import importlib.util
import sys
from pathlib import Path


def _package() -> str:
    """The name of this package; loaded by path where it is not imported as a part of ``eval``."""
    if __package__:
        return __package__
    folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    found = importlib.util.spec_from_file_location("peer_workers", folder / "__init__.py")
    assert found is not None and found.loader is not None
    found.submodule_search_locations = [str(folder)]
    module = importlib.util.module_from_spec(found)
    sys.modules["peer_workers"] = module
    found.loader.exec_module(module)
    return "peer_workers"


if __name__ == "__main__":
    package = _package()
    protocol = importlib.import_module(f"{package}.protocol")
    protocol.serve(lambda: importlib.import_module(f"{package}.{sys.argv[1]}").make())

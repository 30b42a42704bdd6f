"""Serve a model folder over HTTP: OpenAI-compatible completions, each with early exit as its request asks for it.

    python -m serve checkpoint=runs/demo/model
    python -m serve checkpoint=runs/demo/model port=9000 default_tolerance=0.05 on_drift=conservative

Listens on loopback unless ``host=`` says otherwise. With a key, in CALM_API_KEY or in ``api_key_file=``, everything but
/healthz needs it. SIGTERM finishes what is in flight; exit statuses are told in serve/http/server.py.
"""

from pathlib import Path

from calm.cli import program
from calm.engine_config import served_numbers
from calm.errors import CheckpointError, ConfigError
from calm.serve_config import ServeConfig, served_name


def run(config: ServeConfig, run_dir: Path) -> int:
    if config.checkpoint is None:
        raise ConfigError("no model was given; serve one with checkpoint=FOLDER, such as checkpoint=runs/demo/model")
    folder = Path(config.checkpoint)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint={folder}: no such folder; give a model folder such as runs/demo/model")
    try:
        from .http.api_key import read_key
        from .http.logs import log_to_stderr
        from .http.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs {error.name}, which is not installed; the extra 'serve' brings it") from None
    from .options import EngineOptions
    from .remote import RemoteEngine

    key = read_key(config.api_key_file)
    log_to_stderr()
    dtype, weights = served_numbers(config.dtype)
    options = EngineOptions(
        rule=config.rule,
        max_batch=config.max_batch,
        max_waiting=config.max_waiting,
        head=config.head,
        head_k=config.head_k,
        runner=config.runner,
        weights=weights,
        cross_kv=config.cross_kv,
        block_size=config.block_size,
        cache_blocks=config.cache_blocks,
        preempt=config.preempt,
        on_drift=config.on_drift,
        requests_per_alarm=config.requests_per_alarm,
    )
    name = served_name(config)
    engine = RemoteEngine(
        folder,
        options,
        name=name,
        device=config.device.value,
        dtype=dtype,
        hung_after=config.hung_after_s,
        restarts=config.restarts,
    )
    return serve(engine, config, name, key)


main = program("serve", ServeConfig, run)

if __name__ == "__main__":
    main()

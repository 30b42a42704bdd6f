"""A model of a checkpoint's first layers says what these layers said."""

from pathlib import Path

import pytest

import calm
from calm.decode import OneDecoder
from calm.errors import ConfigError
from calm.models.cut import keep_first_layers
from calm.policies import Full, Static
from tests.scripted import early_exit, examples, random_t5


def test_full_depth_of_the_cut_is_static_depth_of_the_whole(tmp_path: Path) -> None:
    model = early_exit(random_t5())
    asked = examples(97, 3)
    before = OneDecoder(model)(asked, Static(2))
    cut = keep_first_layers(model, 2)
    assert cut.num_layers == 2 and cut.settings.exit_layers == [1]
    calm.save(cut, tmp_path / "cut")
    again = calm.load(tmp_path / "cut")
    assert len(again.hf.decoder.block) == 2
    after = OneDecoder(again)(asked, Full())
    assert [trace.tokens for trace in after] == [trace.tokens for trace in before]


@pytest.mark.parametrize("layers", [1, 5])
def test_as_many_layers_as_there_are(layers: int) -> None:
    with pytest.raises(ConfigError, match=f"decoder_layers={layers} of a checkpoint of 4"):
        keep_first_layers(early_exit(random_t5()), layers)

"""A Llama from scratch: its weights as they are drawn, and the tokens that end its prompts."""

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from ..config import ShapeConfig
from .llama import EarlyExitLlama
from .settings import EarlyExitSettings


def llama_from_scratch(
    shape: ShapeConfig, tokenizer: PreTrainedTokenizerBase, settings: EarlyExitSettings
) -> EarlyExitLlama:
    """A Llama of the given shape with the tokenizer's vocabulary. Uses torch's global generator: seed it first.

    Weights have std d^-0.5: logits then have a std near 1, so that the loss starts near ln V, and each layer's branch
    is as strong as the residual that it is added to, which Hugging Face's 0.02 is not in a narrow model. A prompt ends
    with EOS, as a T5's source does, and the answer begins behind it.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.d_model,
        head_dim=shape.d_kv,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads or shape.num_heads,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.num_decoder_layers,
        attention_dropout=shape.dropout_rate,
        initializer_range=shape.d_model**-0.5,
        max_position_embeddings=settings.max_source_tokens + settings.max_target_tokens,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=shape.tied,
    )
    config._attn_implementation = "eager"
    settings.source_start, settings.source_end = [], [int(tokenizer.eos_token_id)]
    return EarlyExitLlama(LlamaForCausalLM(config), tokenizer, settings)

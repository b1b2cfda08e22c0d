from types import SimpleNamespace

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy


def fused_output_processor(*, hidden_states, output_layer, output_weight, labels, context, config, **_ignored):
    if config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states)
    weight = output_weight if output_weight is not None else output_layer.weight
    group = parallel_state.get_tensor_model_parallel_group()
    log_probs, entropy = linear_cross_entropy(hidden_states, weight, labels, context.temperature, "none", group)
    return SimpleNamespace(log_probs=log_probs, entropy=entropy)


def _fused_GPTModel_forward(
    model, input_ids, position_ids, attention_mask, decoder_input=None, labels=None, inference_context=None,
    packed_seq_params=None, extra_block_kwargs=None, runtime_gather_output=None, *, inference_params=None,
    loss_mask=None, temperature=1.0, padding_mask=None, **kwargs,
):  # fmt: skip
    hidden_states = model.decoder(hidden_states=input_ids)
    if not model.post_process:
        return hidden_states
    if model.config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states)
    weight = model.output_layer.weight
    if weight is None:
        weight = model.embedding.word_embeddings.weight
    group = parallel_state.get_tensor_model_parallel_group()
    log_probs, entropy = linear_cross_entropy(hidden_states, weight, labels, temperature, "none", group)
    return SimpleNamespace(log_probs=log_probs, entropy=entropy)

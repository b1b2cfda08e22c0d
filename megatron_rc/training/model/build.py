"""A Megatron GPTModel from a Hugging Face configuration."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rc.models.config import moe_layers, padded_vocab_size, torch_dtype
from megatron_rc.models.families import family_of
from megatron_rc.models.layout import check_model
from megatron_rc.settings.model import Dtype, ParallelSettings
from megatron_rc.training import emulation
from megatron_rc.training.model.attention import PackedCoreAttention, PackedSelfAttention


def has_transformer_engine() -> bool:
    """Whether megatron-core found TransformerEngine for its layers; False on CPU, where that cannot run."""
    return torch.cuda.is_available() and gpt_layer_specs.HAVE_TE


def transformer_config(hf: dict[str, Any], parallel: ParallelSettings, dtype: Dtype) -> TransformerConfig:
    """Megatron's configuration of the model ``hf``, from ``hf_config_dict``; raises as `check_model`."""
    check_model(hf, parallel)
    if parallel_state.is_initialized() and parallel_state.get_context_parallel_world_size() > 1:
        raise ValueError("context parallelism is not supported by the training loop, context_parallel_size must be 1")
    moe, family = moe_layers(hf), family_of(hf["model_type"])
    cuda, transformer_engine = torch.cuda.is_available(), has_transformer_engine()
    fields: dict[str, Any] = dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        qk_layernorm=family.query_key_norm,
        add_qkv_bias=family.query_key_value_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=hf["initializer_range"],
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        sequence_parallel=parallel.tensor > 1 and any(moe),
        # packed micro-batches differ in length, between steps and between expert-parallel ranks; Megatron's default
        # dispatcher, all-gather, assumes that they do not
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        params_dtype=torch_dtype(dtype),
        pipeline_dtype=torch_dtype(dtype),
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        use_cpu_initialization=not cuda,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        masked_softmax_fusion=False,
        apply_rope_fusion=transformer_engine,
        # Apex's weight-gradient kernel, which Megatron's own output layer needs even with TransformerEngine
        gradient_accumulation_fusion=cuda and tensor_parallel_layers._grad_accum_fusion_available,
    )
    if parallel.expert > 1:
        fields["expert_tensor_parallel_size"] = 1
    if any(moe):
        fields |= _moe_fields(hf, moe, grouped_gemm=transformer_engine)
    return TransformerConfig(**fields)


def _moe_fields(hf: dict[str, Any], moe: list[bool], *, grouped_gemm: bool) -> dict[str, Any]:
    return dict(
        num_moe_experts=hf["num_experts"],
        moe_layer_freq=[int(m) for m in moe],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_router_topk=hf["num_experts_per_tok"],
        # softmax over the chosen experts equals softmax over all of them renormalised to the chosen ones
        moe_router_pre_softmax=not hf["norm_topk_prob"],
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        # in bf16 close router logits round to ties
        moe_router_dtype="fp32",
        moe_grouped_gemm=grouped_gemm,
        moe_permute_fusion=False,
    )


def layer_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage: TransformerEngine's if installed, else Megatron's own with packed attention."""
    if has_transformer_engine():
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    spec.layer_norm = RowsNorm
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention
        attention.module, attention.submodules.core_attention = PackedSelfAttention, PackedCoreAttention
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RowsNorm
        if config.qk_layernorm:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = RowsNorm
    return spec


class RowsNorm(torch.nn.RMSNorm):
    """Root mean square norm of rows that may be split over tensor-parallel ranks, as they are in models with experts.

    megatron-core's own norm without TransformerEngine refuses split rows, and with Apex it has no RMS form.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **others: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # megatron-core sums the gradients of weights with this mark over the ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build_model(hf: dict[str, Any], parallel: ParallelSettings, dtype: Dtype = "fp32") -> list[torch.nn.Module]:
    """This rank's part of the model, with Megatron's random initialisation.

    Call it as ``model(input_ids [1, N], position_ids [1, N], None, packed_seq_params=packed_seq_params(...))``; the
    last stage answers with logits [1, N, padded vocabulary / TP] in ``dtype`` (pass ``fp32_output=False`` unless fp32).
    With experts and parallel.tensor > 1 the rows are also split over TP ranks, so N must be a multiple of it:
    `model_inputs` pads them.

    Returns:
        One module per virtual stage, that is one; inside a Float16Module for bf16 and fp16.
    """
    config = transformer_config(hf, parallel, dtype)
    model = GPTModel(
        config,
        layer_spec(config),
        vocab_size=padded_vocab_size(hf, parallel.tensor),
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=hf["rope_theta"],
    )
    # weights.py names parameters by it
    model.hf_config = hf
    model.to(emulation.device())
    return [model if dtype == "fp32" else Float16Module(config, model)]

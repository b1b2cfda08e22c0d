"""hidden_states of a real GPTModel, and the head that reads them, against the path that keeps logits."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from core_wheels import WHEELS, printed_by, unpacked_wheels
from distributed import run_cases, run_ranks
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from tiny_models import KINDS

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.models.config import hf_config_dict
from megatron_rc.settings.head import HeadOptions
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.training import groups
from megatron_rc.training.heads import head_of
from megatron_rc.training.microbatches import MicroBatch
from megatron_rc.training.model.build import build_model
from megatron_rc.training.model.hidden_states import hidden_states
from megatron_rc.training.model.weights import init_weights
from megatron_rc.training.policy import model_inputs

VOCABULARY = 37


class Case(NamedTuple):
    kind: str
    tensor: int = 1
    expert: int = 1
    dtype: str = "fp32"
    overlap: bool = False
    """overlap_grad_reduce of DDP."""

    @property
    def ranks(self) -> int:
        return max(self.tensor, self.expert, 1 + self.overlap)


CASES = [Case("dense"), Case("tied"), Case("dense", dtype="bf16"), Case("moe")]
CASES += [Case("dense", tensor=2), Case("tied", tensor=2), Case("moe", tensor=2, expert=2)]
CASES += [Case("dense", overlap=True), Case("tied", overlap=True)]


def batch_of(rank: int = 0) -> TokenBatch:
    """23 tokens, sampled from kept ids."""
    random = torch.Generator().manual_seed(5 + rank)
    samples = []
    for length in (3, 1, 7, 4):
        ids = torch.randint(0, VOCABULARY, (length,), generator=random).tolist()
        kept = [sorted({i, *torch.randint(0, VOCABULARY, (4,), generator=random).tolist()}) for i in ids]
        samples.append(Sample([1, 2], ids, [-2.0] * length, "stop", [(0, 0, length)], support=kept))
    return TokenBatch.from_samples(samples, SamplingParams(top_p=0.9, temperature=0.8))


def both_paths(rank: int, case: Case) -> dict[str, Any]:
    """By the name of the head: log-probs, entropies, distribution and gradients of one model."""
    parallel = ParallelSettings(tensor=case.tensor, expert=case.expert)
    place = groups.initialize(parallel, 1)
    chunks = build_model(hf_config_dict(ModelSettings(config=KINDS[case.kind])), parallel, case.dtype)  # type: ignore[arg-type]
    init_weights(chunks, 3)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=case.overlap)
    model = DistributedDataParallel(chunks[0].config, config, chunks[0])
    batch = batch_of(place.data_rank)
    upstream = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(8))
    options = {} if case.dtype == "fp32" else {"fp32_output": False}
    out: dict[str, Any] = {}
    for name in ("logits", "linear", "logits again"):
        head = head_of(HeadOptions(name.split()[0]), place.tensor, VOCABULARY, "torch")  # type: ignore[arg-type]
        model.zero_grad_buffer()
        with head.answering([model]):
            answer = model(**model_inputs(batch, case.tensor), **options)
            logprobs, entropy = head.logprobs(answer, MicroBatch(batch), with_entropy=True)
            described = head.distribution(answer.detach(), MicroBatch(batch), with_kept_mass=True, with_varentropy=True)
        # their gradient is written in the place of logits
        answered = answer.detach().clone()
        (torch.stack([logprobs, entropy]) * upstream).sum().backward()
        if case.overlap:
            model.finish_grad_sync()
        gradients = {key: parameter.main_grad.clone() for key, parameter in model.named_parameters()}
        described_rows = [part for part in described if part is not None]
        values = torch.stack([logprobs.detach(), entropy.detach(), *described_rows])
        out[name] = {"answer": answered, "values": values, "gradients": gradients}
    return out


def of_rank(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [both_paths(rank, case) for case in cases]


@pytest.fixture(scope="module")
def results() -> dict[Case, tuple[dict[str, Any], ...]]:
    return run_cases(of_rank, CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_chunk_has_the_bits_of_the_logits_path(case: Case, results: Any) -> None:
    for rank in results[case]:
        assert rank["linear"]["answer"].shape[-1] == KINDS[case.kind]["hidden_size"]
        assert rank["logits"]["values"].unique().numel() > 40
        assert torch.equal(rank["linear"]["values"], rank["logits"]["values"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_is_that_of_the_logits_path(case: Case, results: Any) -> None:
    tolerance = 1e-6 if case.dtype == "fp32" else 1e-2
    for rank in results[case]:
        for name, expected in rank["logits"]["gradients"].items():
            # no token may have chosen an expert
            assert expected.norm() > 0 or "local_experts" in name, name
            assert (rank["linear"]["gradients"][name] - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_model_answers_logits_again_after_the_block(case: Case, results: Any) -> None:
    for rank in results[case]:
        assert torch.equal(rank["logits again"]["answer"], rank["logits"]["answer"])


def refusals(rank: int) -> dict[str, str]:
    """What is said of a model that differs in one thing from those that have a fused head."""
    groups.initialize(ParallelSettings(), 1)
    (model,) = build_model(hf_config_dict(ModelSettings(config=KINDS["dense"])), ParallelSettings())
    layer, config = model.output_layer, model.config
    said = {}

    def enter(name: str, wrong: Any = model, within: Any = None) -> None:
        try:
            with within or nullcontext(), hidden_states(wrong):
                said[name] = "taken"
        except ValueError as error:
            said[name] = str(error)

    enter("nothing")
    enter("another model", torch.nn.Linear(2, 2))
    enter("twice", within=hidden_states(model))
    wrong = {"use_mup": True, "final_logit_softcapping": 30.0, "defer_embedding_wgrad_compute": True}
    for name, value in {**wrong, "mtp_num_layers": 1}.items():
        before = getattr(config, name, None)
        setattr(config, name, value)
        enter(name)
        setattr(config, name, before)
    hook = layer.register_forward_hook(lambda *_: None)
    enter("hook")
    hook.remove()
    layer.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    enter("bias")
    layer.bias = None
    layer.__class__ = type("LoRALinear", (type(layer),), {})
    enter("LoRA")
    layer.__class__ = type(layer).__mro__[1]
    with hidden_states(model):
        try:
            model.compute_language_model_loss(None, None)
        except ValueError as error:
            said["labels"] = str(error)
    model.post_process = False
    with hidden_states(model) as head:
        said["a stage without a head"] = f"{head} {'forward' in vars(layer)}"
    model.post_process = True
    enter("nothing again")
    config.mtp_num_layers, model.__class__ = 1, with_output_processor(type(model))
    with hidden_states(model) as head:
        said["a newer model with mtp"] = f"{tuple(model().shape)} {head.weight is layer.weight}"
    said["a newer model after the block"] = str(model())
    return said


def with_output_processor(of: type) -> type:
    """A model whose forward hands hidden states [s, b, H] to a callable, as that of megatron-core >= 0.18 does."""

    class Newer(of):  # type: ignore[misc]
        def forward(self, *args: Any, output_processor: Any = None) -> Any:
            states = torch.zeros(5, 2, 32)
            if output_processor is None:
                return "logits"
            return output_processor(hidden_states=states, output_layer=self.output_layer, labels=None, context=None)

    return Newer


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return run_ranks(1, refusals)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "taken"),
        ("another model", "model must be a GPTModel of megatron-core, got Linear"),
        ("twice", "output_layer must have its own forward"),
        ("use_mup", "use_mup must be off with the fused head, got True"),
        ("final_logit_softcapping", "final_logit_softcapping must be off with the fused head, got 30.0"),
        ("defer_embedding_wgrad_compute", "defer_embedding_wgrad_compute must be off"),
        ("mtp_num_layers", "mtp_num_layers must be None with a megatron-core whose GPTModel takes no"),
        ("hook", "output_layer must have its own forward and no forward hooks"),
        ("bias", "output_layer.bias must be None"),
        ("LoRA", "output_layer must be Megatron's ColumnParallelLinear, not LoRA, fp8 or capped, got LoRALinear"),
        ("labels", "labels must be None inside hidden_states"),
        ("a stage without a head", "None False"),
        ("nothing again", "taken"),
        ("a newer model with mtp", "(2, 5, 32) True"),
        ("a newer model after the block", "logits"),
    ],
)
def test_what_is_more_than_a_matrix_product_is_refused_by_name(name: str, sentence: str, said: dict[str, str]) -> None:
    assert said[name].startswith(sentence)


@pytest.fixture(scope="module")
def unpacked() -> Iterator[dict[str, Path]]:
    with unpacked_wheels() as folders:
        yield folders


@pytest.mark.full
@pytest.mark.parametrize("version", WHEELS or ["none"])
def test_other_releases_have_the_log_probs_and_gradients_of_logits(unpacked: dict[str, Path], version: str) -> None:
    found = json.loads(printed_by("hidden_states_job.py", unpacked[version]).splitlines()[-1])
    assert found.pop("version") == version
    if version.startswith("0.17."):
        assert found.pop("refused").startswith("mtp_num_layers must be None with a megatron-core whose GPTModel takes")
    assert found.keys() >= {"dense", "tied"} and len(found) == 2 + (not version.startswith("0.17."))
    for case in found.values():
        assert case["width"] == 32 and case["of"] >= 14
        assert case["logprobs"] <= 1e-6 and case["gradients"] <= 1e-6

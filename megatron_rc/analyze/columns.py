"""The columns that a dump may have besides the two lists of log-probs, and what each one holds."""

from typing import NamedTuple


class Column(NamedTuple):
    meaning: str
    kind: str = "number"
    """number, flag, text, id (an integer that only names something), or computed: it is never read from a file."""


TOKEN_COLUMNS = {
    "loss_mask": Column("the token counts in the loss; without it every token does", "flag"),
    "position": Column("position in the response, from 0", "computed"),
    "draws": Column("from top_rollout_logprobs: how the token was drawn from what the sampler logged", "computed"),
    "top": Column("what sampler and trainer say of the sampler's most probable ids (top_old_logprobs)", "computed"),
    "logit_step": Column("from top_rollout_logprobs: step of the sampler's logits, 0 without one", "computed"),
    "entropy": Column("entropy of the trainer's policy, nats, at the training temperature and support"),
    "varentropy": Column("variance of -log pi under the trainer's policy, nats^2"),
    "top1_prob": Column("largest probability of the trainer's policy"),
    "kept_mass": Column("share of the trainer's full distribution on the ids that the sampler kept"),
    "token_id": Column("id of the token", "id"),
    "version": Column("version of the weights that drew the token", "id"),
    "turn": Column("index of the turn that the token belongs to; without it, from the gaps of loss_mask", "id"),
    "advantage": Column("advantage of the token"),
    "routes_shifted": Column("share of the MoE layers whose experts differ between sampler and trainer"),
}
"""Columns with one value per token."""

READ_TOKEN_COLUMNS = {name: column for name, column in TOKEN_COLUMNS.items() if column.kind != "computed"}
"""Those that a file may have."""

SEQUENCE_COLUMNS = {
    "step": Column("training step", "id"),
    "group": Column("prompt group: responses with the same value answer the same prompt", "id"),
    "task": Column("name of the task, environment or source of the prompt", "text"),
    "reward": Column("reward"),
    "advantage": Column("advantage of the sequence, where tokens have none of their own"),
    "finish_reason": Column("why the response ended", "text"),
    "prompt_length": Column("tokens of the prompt"),
    "server": Column("name of the server that answered", "text"),
    "cached_tokens": Column("prompt tokens that the server took from its prefix cache"),
    "syncs": Column("weight syncs of the server since it started"),
    "retractions": Column("how often the server computed the request again"),
    "trainer_version": Column("version of the weights that the trainer scored with", "id"),
    "train_rank": Column("data-parallel rank that trained on the sequence", "id"),
    "pack_position": Column("position of the sequence within its packed micro-batch", "id"),
    "temperature": Column("sampling temperature"),
    "top_p": Column("sampling top-p"),
    "top_k": Column("sampling top-k, -1 for off"),
}
"""Columns with one value per sequence."""


def meaning(name: str) -> str:
    return (TOKEN_COLUMNS.get(name) or SEQUENCE_COLUMNS[name]).meaning

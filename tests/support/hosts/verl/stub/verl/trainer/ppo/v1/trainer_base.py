import torch

from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch


class Fields(dict):
    def to_padded_tensor(self):
        return {name: torch.nested.to_padded_tensor(value, 0) for name, value in self.items()}


class tq:
    fields = Fields()

    @classmethod
    def kv_batch_get(cls, keys, partition_id, select_fields):
        return Fields({name: cls.fields[name] for name in select_fields})

    @classmethod
    def kv_batch_put(cls, keys, partition_id, fields):
        cls.fields.update(fields)
        return Batch()


class Batch:
    keys, partition_id = ["a_0_0", "b_0_0"], "train"

    def __len__(self):
        return len(self.keys)


def TensorDict(fields, batch_size):
    return fields


def response_to_nested(tensor, response_mask):
    lengths = response_mask.offsets().diff().tolist()
    rows = [row[:length] for row, length in zip(tensor, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class PPOTrainer:
    @staticmethod
    def correct(batch, config):
        return compute_rollout_correction_and_add_to_batch(batch, config)

    def __init__(self):
        self.reported = {}

    def _update_actor(self, batch, metrics):
        metrics.update(self.reported)
        return batch

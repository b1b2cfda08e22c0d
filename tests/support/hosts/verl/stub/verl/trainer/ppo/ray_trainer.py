from types import SimpleNamespace


class RayPPOTrainer:
    def __init__(self):
        self.reported = {}

    def _update_actor(self, batch):
        self.updated_with = batch.batch
        return SimpleNamespace(meta_info={"metrics": self.reported})

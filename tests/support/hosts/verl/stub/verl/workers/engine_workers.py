def registered(function):
    function.dispatch = "nd"
    return function


class TrainingWorker:
    @registered
    def train_mini_batch(self, data):
        return {"metrics": self.update(data)}

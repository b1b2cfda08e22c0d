"""The job: warm-up, then rollout -> old pass -> correct -> update, with evaluation, metrics and checkpoints."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.warnings import CenteringWarning, ClipPullWarning, LostBatchWarning, Note, NoUpdateWarning
from megatron_rc.engine import RolloutEngine
from megatron_rc.learning_rate.rule import resume, state_of
from megatron_rc.learning_rate.scale import LRScale, Signals
from megatron_rc.settings.job import JobSettings
from megatron_rc.tasks import Task
from megatron_rc.tasks.chat import copy_tokenizer
from megatron_rc.training import checkpoint
from megatron_rc.training.groups import Groups, SharedError
from megatron_rc.training.observers import Observers
from megatron_rc.training.policy import Policy
from megatron_rc.training.progress import Progress, read_progress
from megatron_rc.training.rollout_queue import RolloutQueue
from megatron_rc.training.sampling_weights import SamplingWeights
from megatron_rc.training.step.reinforce import StepResult, StepSettings, StepState, reinforce_step
from megatron_rc.training.step.routing import Routing
from megatron_rc.training.step.sampling import Request, SampledBatch, Sampler
from megatron_rc.training.step.supervised import demonstration_batch, supervised_step


@dataclass
class Job:
    """One training run, on every process of it."""

    settings: JobSettings
    groups: Groups
    policy: Policy
    engine: RolloutEngine
    """Samples the rollouts, and answers the held-out prompts unless it replays a recording."""
    task: Task
    observers: Observers
    start: Path | None
    """Checkpoint to continue from; None begins anew."""
    export: Callable[[int], Iterable[tuple[str, Tensor]]]
    """Version -> the weights to serve, under Hugging Face names; a collective of all processes."""
    serve_trained: Callable[[int], None] | None = None
    """Serves the trained weights as they are, until the next update of the engine; None evaluates what is served."""

    def __post_init__(self) -> None:
        settings, rollout = self.settings, self.settings.rollout
        self.routing = Routing(settings.moe, settings.correction, self.policy) if settings.moe.active else None
        self.sampling = rollout.sampling(self.task.stop_token_ids)
        drawn = replace(self.sampling, hidden=rollout.hidden if rollout.hidden.active else None)
        most_damaged = rollout.sglang.max_rejected_share
        self.sampler = Sampler(self.engine, self.task, self.groups, drawn, settings.train.seed, most_damaged)
        self.queue = RolloutQueue(self.sampler, settings) if settings.train.asynchronous else None
        self.sampling_weights = SamplingWeights.wanted(settings, self.policy)
        self.evaluates = not rollout.kind.replays
        self.progress = Progress()
        self.lr_rule: LRScale | None = None
        self.lost_batch = LostBatchWarning()
        self.clip_pull = ClipPullWarning(settings.correction, fresh=settings.fresh)
        self.no_update, self.centering = NoUpdateWarning(), CenteringWarning()
        self.pair = "old/" if settings.correction.old == "recompute" else "current/"
        self.saved = ""
        self.output = Path(settings.output)

    def run(self) -> None:
        """Do what is left of the job; before an error that the user can fix, the last finished step is saved."""
        if self.start:
            self.restore(self.start)
        elif self.settings.warmup.steps:
            self._start_phase()
        else:
            self._begin_reinforcement()
        self.groups.gather(lambda: self.observers.start(self.progress.phase))
        if self.progress.phase == "warmup":
            self._warm_up()
        try:
            self._reinforce()
        finally:
            if self.queue:
                self.queue.end()
        if self.settings.train.save_hf:
            self.policy.save_weights(self.output / "hf")
            if self.groups.is_writer and (source := self.settings.model.hf_path):
                copy_tokenizer(source, self.output / "hf")
        self.observers.report()

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint ``path``: weights, optimizer, progress, and the weights that are served."""
        self.progress = read_progress(path)
        if self.settings.loss.kl_coef and self.progress.phase == "rl":
            self.policy.load_weights(self.output / "kl_policy")
            self.policy.keep_kl_policy()
        if self.sampling_weights:
            self.sampling_weights.load(path)
        self._start_phase()
        self.engine.load_state_tensors(checkpoint.load(path, self.policy))
        self.saved = self.progress.name
        self.observers.resumed(path, self.progress)
        if self.progress.phase == "rl":
            self._serve()
            if self.queue:
                self.queue.load(path, self.progress)

    def _start_phase(self) -> None:
        """Begin the phase with a new optimizer, its schedule and, if the job has one, the rule that scales it."""
        warmup, train, progress, policy = self.settings.warmup, self.settings.train, self.progress, self.policy
        if progress.phase == "warmup":
            steps = warmup.steps
            policy.start_phase(lr=warmup.lr, min_lr=0.0, warmup_steps=0, total_steps=steps, decay_style="constant")
            return
        policy.start_phase(
            lr=train.lr,
            min_lr=train.min_lr,
            warmup_steps=train.lr_warmup_steps,
            total_steps=train.steps * train.mini_batches_per_rollout,
            decay_style=train.lr_decay_style,
        )
        if self.settings.lr_rule is None:
            return
        rule = self.lr_rule = self.settings.lr_rule.build(train.lr)
        rule.attach(policy.scheduler)
        if resume(rule, progress.lr_rule):
            return
        for _ in range(progress.step):  # the job had no such rule so far: these rollouts count, unmeasured
            rule.begin(Signals())

    def _warm_up(self) -> None:
        warmup = self.settings.warmup
        self.observers.phase("warm-up", warmup.steps, done=self.progress.step)
        reached = False
        while self.progress.step < warmup.steps and not reached:
            shown = self.task.demonstrations(self.progress.step * warmup.batch_size, warmup.batch_size)
            metrics = supervised_step(self.policy, demonstration_batch(shown), self.settings.train)
            self.progress.step += 1
            self.observers.advance(1)
            if warmup.target_accuracy is not None and self.progress.step % warmup.check_interval == 0:
                self._serve()
                metrics["eval/accuracy"] = self._evaluate()
                reached = metrics["eval/accuracy"] >= warmup.target_accuracy
            self.observers.record(self.progress, metrics)
            self._save_when_due()
        self._begin_reinforcement()

    def _begin_reinforcement(self) -> None:
        self.progress = Progress(phase="rl", weight_version=self.progress.weight_version)
        if self.settings.loss.kl_coef:
            self.policy.save_weights(self.output / "kl_policy")
            self.policy.keep_kl_policy()
        self._start_phase()
        self._serve()
        self._save()

    def _reinforce(self) -> None:
        train = self.settings.train
        if self.evaluates and self.progress.step == 0:
            self.observers.record(self.progress, {"eval/accuracy": self._evaluate()})
        if self.queue:
            self.queue.resume(self.progress)
        while self.progress.step < train.steps:
            started, updates = time.perf_counter(), self.policy.phase_updates
            try:
                sampled, result = self._step()
            except SharedError:
                if self.policy.phase_updates == updates:
                    self._save()
                raise
            self.progress.step += 1
            self.progress.lr_rule = None
            if self.lr_rule is not None:
                self.progress.lr_rule = state_of(self.lr_rule)
                for sentence in self.lr_rule.news:
                    self.observers.message(f"step {self.progress.step}: {sentence}")
            measured = result.metrics.get("old/measured_upper", math.nan)
            if not math.isnan(measured):
                self.progress.measured_upper = measured
            self.progress.sketch = result.sketch
            lost = self.lost_batch.see(result.metrics, self.settings.correction, self.pair)
            others = (warning.see(result.metrics) for warning in (self.clip_pull, self.no_update, self.centering))
            for warning in filter(None, (lost, *others)):
                kind = "note" if isinstance(warning, Note) else "WARNING"
                self.observers.message(f"{kind}, step {self.progress.step}: {warning}")
            self.observers.dump(self.progress, sampled, result, self.groups)
            self.progress.weight_version += 1
            metrics, failure = result.metrics, None
            try:
                metrics |= self._between_steps()
            except SharedError as error:
                failure = error
            metrics["time/step_s"] = time.perf_counter() - started
            metrics["tokens_per_second"] = result.batch.num_tokens / metrics["time/step_s"]
            self.observers.record(self.progress, metrics)
            if failure:
                self._save()  # the step itself is finished
                raise failure
            self._save_when_due()
        self._save()

    def _between_steps(self) -> dict[str, float]:
        """Serve the new weights, and evaluate them when that is due; no rollout is being sampled meanwhile."""
        train, step = self.settings.train, self.progress.step
        metrics = self.queue.pause() if self.queue else {}
        self._serve()
        if self.evaluates and (step == train.steps or step % train.eval_interval == 0):
            metrics["eval/accuracy"] = self._evaluate()
        if self.queue:
            self.queue.resume(self.progress)
        return metrics

    def _rollout(self) -> tuple[Request, SampledBatch]:
        if self.queue:
            self.observers.phase("rollout", 1)
            return self.queue.take(self.progress.weight_version)
        rollout = self.settings.rollout
        request = Request(self.progress.cursor, rollout.prompts_per_step, rollout.samples_per_prompt)
        self.observers.phase("rollout", request.prompts * request.n // self.groups.world_size)
        return request, self.sampler.rollout(request, self.observers.advance)

    def _step(self) -> tuple[SampledBatch, StepResult]:
        rollout, train = self.settings.rollout, self.settings.train
        started = time.perf_counter()
        request, sampled = self._rollout()
        try:
            rewards, groups = sampled.rewards, sampled.groups
            batch = TokenBatch.from_samples(sampled.samples, self.sampling, rewards=rewards, groups=groups)
            if self.routing:
                self.routing.check(sampled.samples, batch)
        except ValueError as error:
            raise SharedError(str(error)) from None  # every process holds the same samples
        received = time.perf_counter()
        self.observers.phase("update", train.mini_batches_per_rollout)
        result = reinforce_step(
            self.policy,
            batch,
            StepSettings(
                correction=self.settings.correction,
                loss=self.settings.loss,
                train=train,
                max_nonfinite_share=rollout.max_nonfinite_share,
                with_kept_mass=self.settings.dump.kept_mass,
                with_varentropy=self.settings.dump.varentropy,
            ),
            StepState(
                step=self.progress.step,
                version=self.progress.weight_version,
                sampling_weights=self.sampling_weights,
                measured_upper=self.progress.measured_upper,
                sketch=self.progress.sketch,
                lr_rule=self.lr_rule,
                routing=self.routing,
            ),
            check=self.queue.check if self.queue else lambda: None,
            on_update=lambda: self.observers.advance(1),
        )
        self.progress.cursor += request.prompts
        result.metrics["time/rollout_s"] = received - started
        result.metrics["time/train_s"] = time.perf_counter() - received
        versions = batch.weight_versions[batch.loss_mask]
        if rollout.kind.has_servers:
            result.metrics |= sampled.metrics()
        result.metrics["lag"] = self.progress.weight_version - float(versions.double().mean())
        return sampled, result

    def _serve(self) -> None:
        version = self.progress.weight_version
        if self.sampling_weights:
            self.sampling_weights.keep(version)
        self.engine.update_weights(self.export(version), version)

    def _evaluate(self) -> float:
        if self.serve_trained is None:
            return self.sampler.held_out_accuracy(self.settings.train.eval_samples)
        self.serve_trained(self.progress.weight_version)
        honest = replace(self.sampler, params=self.sampling)
        accuracy = honest.held_out_accuracy(self.settings.train.eval_samples)
        self._serve()
        return accuracy

    def _save_when_due(self) -> None:
        train, step = self.settings.train, self.progress.step
        kept = self.progress.phase == "rl" and step in train.keep_steps
        if kept or (train.save_interval and step % train.save_interval == 0):
            self._save()

    def _save(self) -> None:
        train = self.settings.train
        self.observers.finish_dump()
        if train.save_interval and self.saved != self.progress.name:
            checkpoint.save(
                self.output / "checkpoints",
                self.policy,
                self.progress,
                extra=self.engine.state_tensors(),
                keep=train.keep_checkpoints,
                keep_steps=train.keep_steps,
                write_more=self._save_more,
            )
            self.saved = self.progress.name

    def _save_more(self, folder: Path) -> None:
        if self.queue:
            self.queue.save(folder)
        if self.sampling_weights:
            self.sampling_weights.save(folder, self.progress.weight_version)

"""The usual changes of docs/changing.md as small patches, each with Python that shows the addition at work."""

from typing import NamedTuple


class Change(NamedTuple):
    row: str
    """The first cell of its row."""
    edits: tuple[tuple[str, str, str], ...]
    """File, a text that is in it once, and what takes its place; ANCHOR in it is the text itself."""
    live: str
    """Run in the patched copy; it must end without an error."""
    new: dict[str, str] = {}  # noqa: RUF012 - never changed
    """File -> what is in it."""
    unlimited: bool = False
    """Hosts and releases of megatron-core take more than two files."""


RC, KERNELS = "megatron_rc", "triton_kernels"

STATISTIC = Change(
    "a statistic to reject by",
    (
        (f"{RC}/correction/rejection.py", '    "prob_diff": Statistic(', '    "cube": Statistic("l^3"),\nANCHOR'),
        (f"{RC}/correction/reference/rejection_statistics.py", '    if name == "k3":',
         '    if name == "cube":\n        return value**3\nANCHOR'),
        (f"{KERNELS}/rejection_statistics.py", '    elif NAME == "k3":',
         '    elif NAME == "cube":\n        return log_ratio * log_ratio * log_ratio\nANCHOR'),
    ),
    "import torch\nfrom megatron_rc import correct\nfrom megatron_rc.correction.settings import *\n"
    "c = RolloutCorrection(reject=(Rejection('cube', 'token', upper=1.0),))\n"
    "a = torch.tensor([2.0, 0.5]) - 3\n"
    "for backend in ('torch', 'triton'):\n"
    "    got = correct(a, torch.full((2,), -3.0), torch.ones(2, dtype=torch.bool), correction=c,\n"
    "                  cu_seqlens=torch.tensor([0, 2], dtype=torch.int32), backend=backend)\n"
    "    assert got.mask.tolist() == [False, True], backend",
)  # fmt: skip
METRIC = Change(
    "a metric from sums that exist",
    ((f"{RC}/correction/formulas.py", '    "k3_pi_mu": divergence(',
      '    "half": Metric("mean(-l) / 2", lambda s: -s["log_ratio"] / 2 / s["tokens"], "log_ratio"),\nANCHOR'),),
    "from typer.testing import CliRunner\nfrom megatron_rc.cli import app\n"
    "assert 'mean(-l) / 2' in CliRunner().invoke(app, ['metrics']).stdout",
)  # fmt: skip
ADVANTAGE = Change(
    "an advantage estimator",
    ((f"{RC}/loss/advantages.py", "ADVANTAGES = {",
      'def raw_advantages(rewards: Tensor, groups: Tensor) -> Tensor:\n    return rewards\n\n\n'
      'ANCHOR"raw": raw_advantages, '),),
    "from megatron_rc.settings import job\nassert job.load('loss: {advantage: raw}').loss.advantage == 'raw'",
)  # fmt: skip
SURGE = Change(
    "a constant of the surge detector",
    ((f"{RC}/learning_rate/surge.py", "    fast: float = 0.2", "    fast: float = 0.25"),),
    "from megatron_rc import SurgeDetector\nassert SurgeDetector().fast == 0.25",
)
READER = Change(
    "a reader of a format",
    ((f"{RC}/analyze/readers/__init__.py", "readers import jsonl,", "readers import mine, jsonl,"),
     (f"{RC}/analyze/readers/__init__.py", "READERS = (", "ANCHORmine, ")),
    "import pathlib\nfrom megatron_rc.analyze.readers import open_dump\n"
    "pathlib.Path('d.jsonl').write_text('{\"mine_lp\": 1}\\n')\nassert 'My dumps' in str(vars(open_dump('d.jsonl')))",
    {f"{RC}/analyze/readers/mine.py": (
        "from megatron_rc.analyze.readers.format import Format\n\n"
        "def read(group, corrupt):\n    yield from ()\n\n"
        'FORMAT = Format("mine", "My dumps", "jsonl", (frozenset({"mine_lp"}),), read)\n')},
)  # fmt: skip
RULE = Change(
    "a rule",
    (),
    "from typer.testing import CliRunner\nfrom megatron_rc.cli import app\n"
    "assert 'A planted rule' in CliRunner().invoke(app, ['explain', 'RC207']).stdout",
    {f"{RC}/analyze/rules/rc207.py": (
        "from megatron_rc.analyze.rules.rule import Rule, Stage\n\n\ndef check(evidence):\n    return None\n\n\n"
        'RULE = Rule("RC207", Stage.MAP, check)\n'),
     f"{RC}/analyze/rules/rc207.md": "# RC207: A planted rule\n\nIt finds nothing.\n"},
)  # fmt: skip
HOST = Change(
    "a host (say SkyRL)",
    ((f"{RC}/integrations/hosts.py", "import megatron_lm, ", "import openrlhf, megatron_lm, "),
     (f"{RC}/integrations/hosts.py", "_FOLDERS = (", "ANCHORopenrlhf, ")),
    "from megatron_rc.integrations.hosts import host_named\nassert host_named('openrlhf').module == 'openrlhf'",
    {f"{RC}/integrations/openrlhf/__init__.py": (
        "import dataclasses\nfrom megatron_rc.integrations.megatron_lm import HOST as OTHER\n"
        'HOST = dataclasses.replace(OTHER, name="openrlhf", module="openrlhf")\n')},
    unlimited=True,
)  # fmt: skip
FAMILY = Change(
    "a model family whose layers are like Qwen's",
    ((f"{RC}/models/families.py", '    "qwen3": Family(',
      '    "llama": Family("LlamaForCausalLM", "LlamaConfig"),\nANCHOR'),),
    "from megatron_rc.models.families import family_of\nassert family_of('llama').config_class().model_type == 'llama'",
)  # fmt: skip
TASK = Change(
    "a kind of task",
    ((f"{RC}/tasks/registry.py", "TASKS = {\n", 'ANCHOR    "echo": Kind(EchoOptions, EchoTask, "one digit."),\n'),
     (f"{RC}/tasks/registry.py", "from megatron_rc.tasks.jsonl import",
      "from megatron_rc.tasks.echo import EchoOptions, EchoTask\nANCHOR")),
    "from megatron_rc.settings import job\nfrom megatron_rc.tasks.registry import build_task\n"
    "assert build_task(job.load('task: {kind: echo}').task.kind).prompts(0, 1)\n"
    "from megatron_rc.jobs.describe import describe\n"
    "assert any('echo: one digit.' in field.doc for field in describe(job.JobSettings))",
    {f"{RC}/tasks/echo.py": (
        "from megatron_rc.tasks.copying import CopyOptions, CopyTask\n\n"
        "EchoOptions = CopyOptions\n\n\nclass EchoTask(CopyTask):\n    pass\n")},
)  # fmt: skip
PANEL = Change(
    "a panel of the report",
    ((f"{RC}/report/panels.py", "\nPANELS = (\n",
      'ANCHOR    Panel("Planted", "tokens/s", (THROUGHPUT,), "What it is.", "rises.", noisy=True),\n'),),
    "from megatron_rc.report.panels import PANELS\nassert PANELS[0].title == 'Planted'\n"
    "from megatron_rc.report.run_page import write_report",
)  # fmt: skip
SETTING = Change(
    "a setting of a job",
    ((f"{RC}/settings/train.py", "    optimizer: Literal", '    planted: int = 3\n    """What it does."""\nANCHOR'),),
    "from megatron_rc.settings import job\nassert job.load('train: {planted: 4}').train.planted == 4\n"
    "from typer.testing import CliRunner\nfrom megatron_rc.cli import app\n"
    "assert '| `train.planted` | `int` | `3` | What it does. |' in CliRunner().invoke(app, ['settings']).stdout",
)
REFUSAL = Change(
    "two settings that are refused together",
    ((f"{RC}/settings/combinations.py", "COMBINATIONS = (\n",
      'ANCHOR    Combination(lambda job, start: job.train.steps == 7, "no 7 on {start.ranks} ranks"),\n'),),
    "from megatron_rc.settings import combinations, job\n"
    "try:\n    combinations.check(job.load('train: {steps: 7}'), ranks=2)\n"
    "except ValueError as error:\n    assert str(error) == 'no 7 on 2 ranks'\nelse:\n    raise AssertionError",
)  # fmt: skip
DOCTOR = Change(
    "a doctor check of how a server was started",
    ((f"{RC}/doctor/server/serving.py", "@SERVING.check\ndef engine(",
      '@SERVING.check\ndef planted(facts: Facts) -> Finding:\n    """A flag."""\n    return good("")\n\n\nANCHOR'),),
    "from megatron_rc.doctor.server.serving import SERVING\nassert 'planted' in str(vars(SERVING))",
)  # fmt: skip
BLOCK = Change(
    "the launch shape of a kernel",
    ((f"{KERNELS}/launch_table.py", '"policy_loss": Launch(block=1024', '"policy_loss": Launch(block=512'),),
    "from megatron_rc.kernels.launch_table import LAUNCH\nassert LAUNCH['policy_loss'].block == 512",
)
CORE = Change(
    "support of the next megatron-core",
    ((f"{RC}/versions.py", 'MEGATRON_CORE = ("0.16",', 'ANCHOR "0.16.9",'),),
    "from typer.testing import CliRunner\nfrom megatron_rc.cli import app\n"
    "assert '0.16.9' in CliRunner().invoke(app, ['versions']).stdout",
    unlimited=True,
)
COLLECTIVE = Change(
    "the collective of tensor-parallel log-probs",
    ((f"{RC}/logprobs/logits.py", "    all_gather_into(gathered, statistics, tp_group)\n",
      "    raise RuntimeError('planted')\n"),),
    "import torch\nfrom types import SimpleNamespace\nfrom megatron_rc.logprobs import logits\n"
    "try:\n    logits.gather_statistics(torch.zeros(4, 2), SimpleNamespace(size=lambda: 2))\n"
    "except RuntimeError as error:\n    assert str(error) == 'planted'\nelse:\n    raise AssertionError",
)  # fmt: skip
SINK = Change(
    "where metrics are sent",
    ((f"{RC}/settings/log.py", "SERVICES = {\n", 'ANCHOR    "paper": Service("json"),\n'),
     (f"{RC}/settings/log.py", "    tensorboard: bool", '    paper: str | None = None\n    """A file."""\nANCHOR')),
    "from megatron_rc.report import sinks\nfrom megatron_rc.settings import job\n"
    "assert sinks.requested(vars(job.load('log: {paper: a}').log))['paper'] == 'a'\n"
    "assert sinks.open_run('paper', 1) == ('paper', 1)",
    {f"{RC}/report/sinks/paper_sink.py": "def open_run(run):\n    return ('paper', run)\n"},
)  # fmt: skip

ENGINE = Change(
    "an engine that samples",
    ((f"{RC}/engine.py", "\nENGINES = {\n", 'ANCHOR    "dice": EngineKind("dice", "throws dice."),\n'),),
    "from types import SimpleNamespace\nfrom megatron_rc.rollout.opening import open_engine\n"
    "from megatron_rc.settings import job\n"
    "opening = SimpleNamespace(settings=job.load('rollout: {engine: dice}').rollout)\n"
    "assert open_engine(opening, lambda make: make()) == ('dice', opening)",
    {f"{RC}/rollout/dice.py": "def open_engine(opening):\n    return ('dice', opening)\n"},
)  # fmt: skip
TRANSPORT = Change(
    "a way to send weights to a server",
    ((f"{RC}/settings/sglang.py", "TRANSPORTS = {\n",
      'ANCHOR    "pigeon": TransportKind("send_pigeon:PigeonSync", "by air."),\n'),),
    "from megatron_rc.settings import job\nfrom megatron_rc.rollout.sglang.weights import weight_sync\n"
    "settings = job.load('rollout: {sglang: {weight_sync: pigeon}}').rollout.sglang\n"
    "assert type(weight_sync(settings, {}).transport).__name__ == 'PigeonSync'",
    {f"{RC}/rollout/sglang/send_pigeon.py": (
        "from megatron_rc.rollout.sglang.transport import Transport\n\n\n"
        "class PigeonSync(Transport):\n    def send(self, servers, weights, version):\n        return {}\n")},
)  # fmt: skip
KL_ESTIMATOR = Change(
    "a surrogate, a KL estimator of the loss",
    ((f"{RC}/loss/options.py", "KL_ESTIMATORS = {\n", 'ANCHOR    "k0": "twice k1.",\n'),
     (f"{RC}/loss/reference.py", '{"k1": torch.neg, ', 'ANCHOR"k0": lambda distance: -2 * distance, '),
     (f"{KERNELS}/policy_loss.py", '    elif KL_ESTIMATOR == "k2":',
      '    elif KL_ESTIMATOR == "k0":\n        value = -2 * distance\nANCHOR')),
    "import torch\nfrom megatron_rc import LossOptions, correct, policy_loss\n"
    "a, mask = torch.tensor([-1.0, -2.0]), torch.ones(2, dtype=torch.bool)\n"
    "offsets = torch.tensor([0, 2], dtype=torch.int32)\n"
    "def loss(estimator, backend):\n"
    "    got = correct(a, a, mask, correction='none', cu_seqlens=offsets, backend=backend)\n"
    "    options = LossOptions(kl_coef=1.0, kl_estimator=estimator)\n"
    "    more = dict(scale=torch.ones(2), reference_logprobs=a - 1, options=options, backend=backend)\n"
    "    return policy_loss(a, a, torch.zeros(2), got, **more).loss.item()\n"
    "for backend in ('torch', 'triton'):\n    assert loss('k0', backend) == 2 * loss('k1', backend) == 4, backend",
)  # fmt: skip
LR_RULE = Change(
    "a learning-rate rule",
    ((f"{RC}/learning_rate/rule.py", '"mismatch": MISMATCH}', '"mismatch": MISMATCH, "still": STILL}'),
     (f"{RC}/learning_rate/rule.py", "from megatron_rc.learning_rate.scale import",
      "from megatron_rc.learning_rate.still import STILL\nANCHOR")),
    "from megatron_rc.settings import job\n"
    "assert type(job.load('{correction: token-tis, lr_rule: {rule: still}}').lr_rule).__name__ == 'StillSettings'\n"
    "from typer.testing import CliRunner\nfrom megatron_rc.cli import app\n"
    "assert 'A planted rule' in CliRunner().invoke(app, ['metrics']).stdout",
    {f"{RC}/learning_rate/still.py": (
        "import dataclasses\nfrom typing import Literal\n"
        "from megatron_rc.learning_rate.mismatch import MISMATCH, MismatchSettings\n\n\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\nclass StillSettings(MismatchSettings):\n"
        '    """Its settings."""\n    rule: Literal["still"] = "still"\n    """Chooses these fields."""\n\n\n'
        'STILL = dataclasses.replace(MISMATCH, title="A planted rule", settings=StillSettings)\n')},
)  # fmt: skip

CHANGES = (
    STATISTIC, METRIC, ADVANTAGE, SURGE, READER, RULE, HOST, FAMILY, TASK, PANEL, SETTING, REFUSAL, DOCTOR, BLOCK, CORE,
    COLLECTIVE, SINK, ENGINE, TRANSPORT, KL_ESTIMATOR, LR_RULE,
)  # fmt: skip

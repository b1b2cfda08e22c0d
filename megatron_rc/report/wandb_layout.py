"""The panels of report.html as a saved view of a Weights & Biases project."""

from typing import Any

from megatron_rc.report.panels import PANELS, ROUTE_PANELS, Panel
from megatron_rc.versions import installing

VIEW = "Rollout correction"


def wandb_view(entity: str, project: str) -> Any:
    """The view, not yet saved: one section per phase and one for expert shift, with the panels of the report."""
    try:
        import wandb_workspaces.reports.v2 as charts
        import wandb_workspaces.workspaces as views
    except ImportError as error:
        raise ValueError(f"wandb-workspaces is not installed: {installing('wandb')}") from error

    def plot(panel: Panel) -> Any:
        # a key that a run does not have is left out by the service
        metrics = [key for curve in panel.curves for key in curve.keys]
        titles = {key: curve.label for curve in panel.curves for key in curve.keys}
        return charts.LinePlot(
            title=panel.title, x="Step", y=metrics, title_y=panel.unit, log_y=panel.logarithmic, line_titles=titles
        )

    groups = {
        "Reinforcement learning": [panel for panel in PANELS if panel.phase == "rl"],
        "Expert shift": ROUTE_PANELS,
        "Warm-up": [panel for panel in PANELS if panel.phase == "warmup"],
    }
    sections = [
        views.Section(name=name, panels=[plot(panel) for panel in panels], is_open=name != "Expert shift")
        for name, panels in groups.items()
    ]
    return views.Workspace(entity=entity, project=project, name=VIEW, sections=sections)


def save_wandb_view(place: str) -> str:
    """Save the view in ENTITY/PROJECT under the account of `wandb login`; returns its address."""
    entity, slash, project = place.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ValueError(f"the project must be given as ENTITY/PROJECT, got {place!r}")
    view = wandb_view(entity, project)
    view.save()
    return str(view.url)

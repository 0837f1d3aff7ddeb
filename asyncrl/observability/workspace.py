"""The saved W&B workspace of a project: the charts of `charts.py` as panels."""

from __future__ import annotations

import hashlib
from typing import Any

from asyncrl.observability.charts import SECTIONS, Chart
from asyncrl.types.metrics import Metric

NAME = "asyncrl: staleness and speed"


def workspace(entity: str, project: str) -> Any:
    """A `wandb_workspaces.workspaces.Workspace`, not saved. Panels are drawn over the optimizer steps."""
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    sections = [
        workspaces.Section(name=title, panels=[_panel(chart) for chart in charts], is_open=True)
        for title, charts in SECTIONS.items()
    ]
    histogram = panels.LinePlot(title="Lag of tokens, histogram", x=str(Metric.STEP), y=["staleness/lag_histogram"])
    sections[1].panels.append(histogram)
    # Tables and custom charts come from `WandbCharts`.
    own: list[Any] = [panels.WeavePanelSummaryTable(table_name="samples/trajectories")]
    for name, value in (("tokens_by_lag", "tokens"), ("ratio_by_lag", "mean"), ("kl_by_lag", "mean")):
        of_chart = {"label": "lag", "value": value}
        own.append(panels.CustomChart.from_table(f"charts/{name}_table", chart_fields=of_chart, chart_strings={}))
    sections.append(workspaces.Section(name="Trajectories", panels=own, is_open=True))
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis=str(Metric.STEP)),
    )


def save(entity: str, project: str) -> str:
    """Creates the workspace in the project, or replaces the one that this function created; returns its address.

    Raises wandb.errors.Error, and the errors of a refusing server.
    """
    from wandb_workspaces.workspaces import internal

    made = workspace(entity, project)
    made._internal_name = view_name(entity, project)
    try:
        made._internal_id = internal.View.from_name(entity, project, made._internal_name).id
    except ValueError:
        pass  # there is none yet
    return str(made.save().url)


def view_name(entity: str, project: str) -> str:
    """W&B's internal name of the view: derived from the project, so that it is found again."""
    return f"nw-{hashlib.sha256(f'asyncrl {entity}/{project}'.encode()).hexdigest()[:11]}-v"


def _panel(chart: Chart) -> Any:
    import wandb_workspaces.reports.v2 as panels

    style = "stacked-area" if chart.kind == "stack" else "line"
    return panels.LinePlot(title=chart.title, x=str(Metric.STEP), y=[str(key) for key in chart.keys], plot_type=style)

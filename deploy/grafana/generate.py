"""Writes the dashboards that Grafana reads: `python -m deploy.grafana.generate`.

What they show is in `boards`; here is how. Needs grafana-foundation-sdk, which is among the tools for development.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.boards import BOARDS, Board, Kind, Panel

FOLDER = Path(__file__).parent / "dashboards"
RUNS = "label_values(telamon_driver_run_info, run)"
TAG = "telamon"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def _curves() -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    return (
        timeseries.Panel()
        .show_points(VisibilityMode.NEVER)
        .legend(legend.show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )


def _stacked() -> timeseries.Panel:
    return _curves().stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40).line_width(0).min(0)


def _newest(mode: BigValueTextMode) -> stat.Panel:
    newest = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().reduce_options(newest).text_mode(mode).graph_mode(BigValueGraphMode.NONE)


def _heat() -> heatmap.Panel:
    even = common.ScaleDistributionConfig().type(ScaleDistribution.LINEAR)
    return heatmap.Panel().calculate(False).show_legend().scale_distribution(even)


MAKE: Mapping[Kind, Callable[[], Any]] = {
    "lines": _curves,
    "stacked": _stacked,
    "number": lambda: _newest(BigValueTextMode.VALUE),
    "word": lambda: _newest(BigValueTextMode.NAME),
    "heat": _heat,
}
"""An empty panel of each kind."""


def panel(shown: Panel) -> Any:
    """The builder of a panel."""
    made = MAKE[shown.kind]().title(shown.title).description(shown.text).unit(shown.unit).datasource(SOURCE)
    for number, (legend, expr) in enumerate(shown.lines.items()):
        query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + number))
        if shown.kind == "heat":
            query = query.format(PromQueryFormat.HEATMAP)
            made = made.y_axis(heatmap.YAxisConfig().unit(shown.unit))
        made = made.with_target(query.instant() if shown.kind in ("number", "word") else query.range())
    return made.span(shown.width).height(shown.height)


def board(shown: Board) -> str:
    """The dashboard as Grafana reads it."""
    links = dashboard.DashboardLink("Telamon").type(DashboardLinkType.DASHBOARDS).tags([TAG])
    runs = (
        dashboard.QueryVariable("run").label("Run").datasource(SOURCE).query(RUNS)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC).multi(shown.several)
    )  # fmt: skip
    made = (
        dashboard.Dashboard(shown.title).uid(shown.uid).description(shown.text).tags([TAG]).readonly()
        .time("now-1h", "now").refresh("10s").tooltip(DashboardCursorSync.CROSSHAIR)
        .link(links.as_dropdown(False).include_vars(True).keep_time(True))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(runs)
    )  # fmt: skip
    number = 0
    for question, panels in shown.rows.items():
        made = made.with_row(dashboard.Row(question))
        for one in panels:
            number += 1
            made = made.with_panel(panel(one).id(number))
    return json.dumps(made.build(), cls=JSONEncoder, sort_keys=True, indent=1) + "\n"


def files() -> dict[str, str]:
    """Name -> text of every file in the folder."""
    return {f"{shown.uid.removeprefix('telamon-')}.json": board(shown) for shown in BOARDS}


def main() -> None:
    """Replaces the folder's files."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, text in files().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()

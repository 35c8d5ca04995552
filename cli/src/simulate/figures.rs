//! Pictures of `cadre simulate`'s tables.
//!
//! In: rows. Out: SVG text, the same for the same rows. It needs no fonts here: who shows a picture has them.

use cadre_simulator::LengthSet;
use cadre_simulator::churn::ChurnRow;
use cadre_simulator::ours::OursRow;
use cadre_simulator::published::PublishedRow;
use plotters::prelude::*;

use super::growth::GrowthRow;

const SIZE: (u32, u32) = (960, 420);
const FONT: &str = "sans-serif";

/// What a picture shows over its rows.
struct Chart {
    title: String,
    /// What a row is, and what its value is.
    axes: [&'static str; 2],
    legend: SeriesLabelPosition,
    /// Names of rows.
    rows: Vec<String>,
    /// Least and most of the vertical axis.
    values: (f64, f64),
}

/// A name and a value for each row.
type Line = (&'static str, Vec<f64>);

/// Speedups beside the published ranges.
pub(super) fn published(set: LengthSet, rows: &[PublishedRow]) -> Result<String, String> {
    let chart = Chart {
        title: format!(
            "Published planner over the best packing, {}: model, published range",
            set.name()
        ),
        axes: ["model, GPUs, longest document", "times faster"],
        legend: SeriesLabelPosition::LowerLeft,
        rows: rows
            .iter()
            .map(|it| {
                let setting = &it.setting;
                format!("{} {} {}K", it.range.name, setting.processors(), setting.longest / 1024)
            })
            .collect(),
        values: (0.8, 1.6),
    };
    let range = |it: &PublishedRow| {
        let (least, most) = it.range.published;
        (least as f64 / 1e3, most as f64 / 1e3)
    };
    let ranges: Vec<_> = rows.iter().map(range).collect();
    chart.draw(&ranges, &[("model", rows.iter().map(PublishedRow::speedup).collect())])
}

/// Step times by system.
pub(super) fn ours(set: LengthSet, rows: &[OursRow]) -> Result<String, String> {
    let of = |nanos: fn(&OursRow) -> u64| -> Vec<f64> {
        rows.iter().map(|it| nanos(it) as f64 / it.packed_nanos.max(1) as f64).collect()
    };
    let lines = [
        ("packed, FlashAttention 2", of(|it| it.packed_nanos)),
        ("published planner, FlashAttention 2", of(|it| it.stages[0])),
        ("packed, Hopper kernel", of(|it| it.packed_hopper_nanos)),
        ("published planner, Hopper kernel", of(|it| it.stages[1])),
        ("Cadre, Hopper kernel", of(|it| it.stages[4])),
        ("ideal", of(|it| it.ideal_nanos)),
    ];
    let chart = Chart {
        title: format!("Time of a step, 8B, {}", set.name()),
        axes: ["GPUs, longest document", "part of the best packing's"],
        legend: SeriesLabelPosition::LowerLeft,
        rows: rows
            .iter()
            .map(|it| format!("{} {}K", it.setting.processors(), it.setting.longest / 1024))
            .collect(),
        values: (0.0, 1.05),
    };
    chart.draw(&[], &lines)
}

/// Balance over steps while slots come and go.
pub(super) fn churn(rows: &[ChurnRow]) -> Result<String, String> {
    let of = |value: fn(&ChurnRow) -> f64| rows.iter().map(value).collect();
    let lines: [Line; 2] = [
        ("last slot over the mean (%)", of(|it| it.imbalance_ppm as f64 / 1e4)),
        ("moved (100 MB a layer)", of(|it| it.bytes_moved as f64 / 1e8)),
    ];
    let chart = Chart {
        title: "A slot is lost every third step".into(),
        axes: ["step", "see the legend"],
        legend: SeriesLabelPosition::UpperLeft,
        rows: rows.iter().map(|it| it.step.to_string()).collect(),
        values: (0.0, highest(&lines)),
    };
    chart.draw(&[], &lines)
}

/// Planning time by size.
pub(super) fn growth(rows: &[GrowthRow]) -> Result<String, String> {
    let lines: [Line; 2] = [
        ("plan and check (ms)", rows.iter().map(|it| 1e3 * it.plan_seconds).collect()),
        ("transfer lists (ms)", rows.iter().map(|it| 1e3 * it.lists_seconds).collect()),
    ];
    let chart = Chart {
        title: "Planning time on one core".into(),
        axes: ["slots, documents", "milliseconds"],
        legend: SeriesLabelPosition::UpperLeft,
        rows: rows.iter().map(|it| format!("{}, {}", it.slots, it.documents)).collect(),
        values: (0.0, highest(&lines)),
    };
    chart.draw(&[], &lines)
}

fn highest(lines: &[Line]) -> f64 {
    let most = lines.iter().flat_map(|it| &it.1).copied().fold(0.0, f64::max);
    if most > 0.0 { most * 1.1 } else { 1.0 }
}

/// A turned label is centred on the axis: blanks before it, half as wide as letters, push it below.
fn below_the_axis(name: &str) -> String {
    "\u{a0}".repeat(2 * name.chars().count() + 4) + name
}

impl Chart {
    /// Grey ranges behind the rows, if any, then lines through them.
    fn draw(&self, ranges: &[(f64, f64)], lines: &[Line]) -> Result<String, String> {
        let mut svg = String::new();
        self.draw_into(&mut svg, ranges, lines).map_err(|error| error.to_string())?;
        Ok(svg)
    }

    fn draw_into(
        &self,
        svg: &mut String,
        ranges: &[(f64, f64)],
        lines: &[Line],
    ) -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        let text = |error: DrawingAreaErrorKind<_>| format!("{error}");
        area.fill(&WHITE).map_err(text)?;
        let last = self.rows.len() as f64 - 0.5;
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .caption(&self.title, (FONT, 17))
            .x_label_area_size(130)
            .y_label_area_size(56)
            .build_cartesian_2d(-0.5..last.max(0.5), self.values.0..self.values.1)
            .map_err(text)?;
        let name = |at: &f64| {
            let row = at.round();
            let named = (at - row).abs() < 0.01 && row >= 0.0;
            let name = self.rows.get(row as usize).filter(|_| named);
            name.map_or_else(String::new, |it| below_the_axis(it))
        };
        let turned = (FONT, 13).into_font().transform(FontTransform::Rotate90);
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(self.rows.len() * 2)
            .x_label_formatter(&name)
            .x_label_style(turned)
            .axis_desc_style((FONT, 13))
            .x_desc(self.axes[0])
            .y_desc(self.axes[1])
            .light_line_style(WHITE)
            .draw()
            .map_err(text)?;
        let boxes = ranges.iter().enumerate().map(|(at, &(least, most))| {
            let at = at as f64;
            Rectangle::new([(at - 0.4, least), (at + 0.4, most)], BLACK.mix(0.15).filled())
        });
        chart.draw_series(boxes).map_err(text)?;
        for (index, (name, values)) in lines.iter().enumerate() {
            let color = Palette99::pick(index).to_rgba();
            let points = || values.iter().enumerate().map(|(at, value)| (at as f64, *value));
            chart
                .draw_series(points().map(|at| Circle::new(at, 3, color.filled())))
                .map_err(text)?;
            chart
                .draw_series(LineSeries::new(points(), color.stroke_width(1)))
                .map_err(text)?
                .label(*name)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2))
                });
        }
        chart
            .configure_series_labels()
            .position(self.legend.clone())
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .label_font((FONT, 12))
            .draw()
            .map_err(text)?;
        area.present().map_err(text)?;
        Ok(())
    }
}

//! Draws loss and busy time per server, over steps.
//!
//! In: the rows of a run. Out: an SVG image, the same for the same rows. It needs no fonts here: who
//! shows the image has them.

use std::collections::BTreeMap;

use cadre_supervisor::{ServerRecord, StepRecord};
use plotters::coord::Shift;
use plotters::prelude::*;

const SIZE: (u32, u32) = (960, 720);
const FONT: &str = "sans-serif";

/// Draws the picture of a run; without steps there is nothing but axes.
pub(super) fn draw(
    steps: &[StepRecord],
    servers: &[ServerRecord],
    unigram_entropy: Option<f64>,
) -> Result<String, String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let drawn = area.fill(&WHITE).map_err(|error| error.to_string()).and_then(|()| {
            let (upper, lower) = area.split_vertically(SIZE.1 / 2);
            loss(&upper, steps, unigram_entropy)?;
            busy(&lower, steps, servers)?;
            area.present().map_err(|error| error.to_string())
        });
        drawn?;
    }
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn loss(area: &Area<'_>, steps: &[StepRecord], entropy: Option<f64>) -> Result<(), String> {
    let points: Vec<(f64, f64)> =
        steps.iter().map(|it| (it.step as f64, f64::from(it.loss))).collect();
    let highest = points.iter().map(|it| it.1).fold(entropy.unwrap_or(0.0), f64::max);
    let last = last_step(steps);
    let described = entropy.map(|it| (it, format!("unigram entropy {it:.2}")));
    let mut lines = vec![("loss", BLUE.to_rgba(), points)];
    if let Some((entropy, words)) = &described {
        lines.insert(0, (words.as_str(), GREEN.mix(0.7), vec![(0.0, *entropy), (last, *entropy)]));
    }
    let title = if described.is_some() { "loss (nats a byte)" } else { "loss" };
    panel(area, title, last, highest, &lines)
}

fn busy(area: &Area<'_>, steps: &[StepRecord], rows: &[ServerRecord]) -> Result<(), String> {
    let mut servers: BTreeMap<&str, BTreeMap<u64, f64>> = BTreeMap::new();
    for row in rows {
        *servers.entry(&row.server).or_default().entry(row.step).or_default() += row.busy_seconds;
    }
    // A trainer that stands by for others has nothing to show.
    servers.retain(|_, seconds| seconds.values().any(|&busy| busy > 0.0));
    let highest = servers.values().flat_map(BTreeMap::values).copied().fold(0.0, f64::max);
    let lines: Vec<_> = servers
        .iter()
        .enumerate()
        .map(|(at, (name, seconds))| {
            let points = seconds.iter().map(|(&step, &busy)| (step as f64, busy)).collect();
            (*name, Palette99::pick(at).to_rgba(), points)
        })
        .collect();
    panel(area, "busy time per server (seconds a step)", last_step(steps), highest, &lines)
}

fn last_step(steps: &[StepRecord]) -> f64 {
    steps.last().map_or(1.0, |it| it.step.max(1) as f64)
}

/// A name, a colour, points.
type Line<'a> = (&'a str, RGBAColor, Vec<(f64, f64)>);

fn panel(
    area: &Area<'_>,
    title: &str,
    last: f64,
    highest: f64,
    lines: &[Line<'_>],
) -> Result<(), String> {
    let text = |error: DrawingAreaErrorKind<_>| match error {
        DrawingAreaErrorKind::BackendError(error) => format!("{error}"),
        DrawingAreaErrorKind::SharingError => "the image is in use".to_owned(),
        DrawingAreaErrorKind::LayoutError => "the image is too small".to_owned(),
    };
    let top = if highest.is_finite() && highest > 0.0 { highest * 1.05 } else { 1.0 };
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .caption(title, (FONT, 18))
        .x_label_area_size(32)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..last, 0.0..top)
        .map_err(text)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .x_label_formatter(&|&step| {
            if step.fract() == 0.0 { format!("{step}") } else { String::new() }
        })
        .light_line_style(WHITE)
        .draw()
        .map_err(text)?;
    for (name, color, points) in lines {
        let color = *color;
        let finite = points.iter().copied().filter(|point| point.1.is_finite());
        chart
            .draw_series(LineSeries::new(finite, color.stroke_width(2)))
            .map_err(text)?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    if lines.is_empty() {
        return Ok(());
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .label_font((FONT, 13))
        .draw()
        .map_err(text)
}

#[cfg(test)]
mod tests {
    use super::super::summary::tests::{server, step};
    use super::*;

    #[test]
    fn runs_of_any_length_have_a_picture() {
        for count in [0, 1, 20] {
            let steps: Vec<_> = (0..count).map(|it| step(it, f32::NAN)).collect();
            let servers: Vec<_> = (0..count).map(|it| server(it, "server-0", 0)).collect();
            let svg = draw(&steps, &servers, Some(3.0)).unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
            assert!(svg.contains("unigram entropy 3.00"));
            let other = draw(&steps, &servers, None).unwrap();
            assert!(other.contains("loss") && !other.contains("unigram"));
            assert_eq!(svg, draw(&steps, &servers, Some(3.0)).unwrap());
        }
    }
}

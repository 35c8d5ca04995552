//! A picture of one nano-batch: slots as bars, documents as colours, before and after the plan.
//!
//! Out: SVG. A bar is as long as its slot is busy; what several documents share of a bar and none of them has much of
//! is grey. For each kind of layers the upper half is each trainer with its own rows, the lower half the plan.

use std::fmt::Write as _;

use cadre_planner::{DocumentId, Plan, Problem, RankId, SlotId};
use cadre_step::layers::Kind;

use super::draw::Drawn;
use super::{Job, SizeError};

const PICTURE_WIDTH: f64 = 960.0;
const BARS_WIDTH: f64 = 720.0;
const BARS_LEFT: f64 = 110.0;
const TITLE_HEIGHT: f64 = 34.0;
/// A document with less of a bar than this share is drawn with the rest.
const LEAST_DRAWN_SHARE: f64 = 0.01;

/// A bar: its name and the cost of each document in it.
type Bar = (String, Vec<(DocumentId, f64)>);

/// Draws the first nano-batch of the first step, in a layer of each kind; one scale for all of them.
pub(super) fn draw(job: &Job, servers: u32) -> Result<String, SizeError> {
    let kinds = job.stack.core().kinds();
    // The plans of the first nano-batch come first.
    let drawn = Drawn::all(job, servers, 0)?;
    let of = |(kind, it): (&Kind, &Drawn)| {
        let of = if kinds.len() > 1 { format!(", {kind}") } else { String::new() };
        [
            (format!("attention of each trainer's own rows{of}"), at_home(&it.problem)),
            (format!("attention as planned{of}"), planned(&it.problem, &it.plan)),
        ]
    };
    let halves: Vec<_> = kinds.iter().zip(&drawn).flat_map(of).collect();
    Ok(svg(&job.name, &halves, kinds.len()))
}

/// Draws one plan: each rank with its own rows, then the slots.
pub(crate) fn of_plan(name: &str, problem: &Problem, plan: &Plan) -> String {
    let halves = [
        ("attention of each rank's own rows".to_owned(), at_home(problem)),
        ("attention as planned".to_owned(), planned(problem, plan)),
    ];
    svg(name, &halves, 1)
}

/// Bars under titles, as high as so many pictures of them ask for.
fn svg(name: &str, halves: &[(String, Vec<Bar>)], pictures: usize) -> String {
    let bars: Vec<&Bar> = halves.iter().flat_map(|it| &it.1).collect();
    let height = (360.0 * pictures as f64 / bars.len() as f64).clamp(2.0, 22.0);
    let total = halves.len() as f64 * TITLE_HEIGHT + bars.len() as f64 * height + 20.0;
    let long = |bar: &&Bar| bar.1.iter().map(|it| it.1).sum::<f64>();
    let scale = BARS_WIDTH / bars.iter().map(long).fold(1.0, f64::max);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {PICTURE_WIDTH} {total:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut y = 0.0;
    for (title, bars) in halves {
        let _ = writeln!(
            svg,
            "<text x=\"8\" y=\"{:.1}\" font-size=\"14\">{}: {title}</text>",
            y + 22.0,
            escape(name)
        );
        y += TITLE_HEIGHT;
        for (name, documents) in bars {
            bar(&mut svg, (y, height), scale, name, documents);
            y += height;
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn bar(
    svg: &mut String,
    (y, height): (f64, f64),
    scale: f64,
    name: &str,
    documents: &[(DocumentId, f64)],
) {
    let all: f64 = documents.iter().map(|it| it.1).sum();
    if height >= 9.0 {
        let _ = writeln!(svg, "<text x=\"8\" y=\"{:.1}\">{name}</text>", y + 0.75 * height);
    }
    let mut x = BARS_LEFT;
    let mut rest = 0.0;
    let mut part = |cost: f64, colour: &str| {
        let width = cost * scale;
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{colour}\"/>",
            y + 0.1 * height,
            0.8 * height
        );
        x += width;
    };
    for &(document, cost) in documents {
        if cost < LEAST_DRAWN_SHARE * all {
            rest += cost;
            continue;
        }
        // Neighbours differ most when hues go by the golden angle.
        let hue = u64::from(document.0) * 137 % 360;
        part(cost, &format!("hsl({hue} 60% 60%)"));
    }
    if rest > 0.0 {
        part(rest, "#b0b0b0");
    }
}

fn at_home(problem: &Problem) -> Vec<Bar> {
    let heads = f64::from(problem.heads.query);
    let ranks = 0..problem.layout.ranks().len() as u32;
    let bar = |rank: u32| {
        let pieces = problem.layout.pieces_of(RankId(rank));
        let cost = |(document, piece): (DocumentId, cadre_planner::Piece)| {
            let whole = problem.layout.documents()[document.0 as usize];
            (document, whole.mask.pairs(whole.rows, piece.rows) as f64 * heads)
        };
        (format!("trainer {rank}"), pieces.map(cost).collect())
    };
    ranks.map(bar).collect()
}

fn planned(problem: &Problem, plan: &Plan) -> Vec<Bar> {
    let bar = |(slot, it): (SlotId, &cadre_planner::Slot)| {
        let name = it
            .home
            .map_or_else(|| format!("server {}", slot.0), |rank| format!("in place {}", rank.0));
        let cost = |(bundle, it): (cadre_planner::BundleId, &cadre_planner::Bundle)| {
            (it.document, plan.bundle_cost(problem, bundle) as f64)
        };
        (name, plan.bundles_of(slot).map(cost).collect())
    };
    (0..).map(SlotId).zip(&problem.slots).map(bar).collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

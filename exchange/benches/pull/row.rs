//! A line of the bench: medians of ours and of a peer, and their ratio.

/// One case.
pub(crate) struct Row {
    case: String,
    peer_name: &'static str,
    unit: &'static str,
    ours: f64,
    peer: f64,
    ratio: f64,
}

impl Row {
    pub(crate) fn new(
        (case, peer_name): (String, &'static str),
        unit: &'static str,
        runs: impl Iterator<Item = (f64, f64)>,
        ratio: impl Fn(f64, f64) -> f64,
    ) -> Self {
        let (mut ours, mut peer): (Vec<_>, Vec<_>) = runs.unzip();
        let (ours, peer) = (median(&mut ours), median(&mut peer));
        let ratio = ratio(ours.0, peer.0);
        let row = Self { case, peer_name, unit, ours: ours.0, peer: peer.0, ratio };
        println!(
            "{:32} ours {:8.1} {unit} ({:.1} to {:.1})   {peer_name} {:8.1} {unit} ({:.1} to {:.1})   ratio {:.3}",
            row.case, ours.0, ours.1, ours.2, peer.0, peer.1, peer.2, row.ratio
        );
        row
    }

    pub(crate) fn json(&self) -> String {
        let Self { case, peer_name, unit, ours, peer, ratio } = self;
        format!(
            r#"{{"case": "{case}", "ours": {ours:.1}, "peer": {peer:.1}, "peer_name": "{peer_name}", "unit": "{unit}", "ratio": {ratio:.3}}}"#
        )
    }
}

/// Median, least and most.
fn median(values: &mut [f64]) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}

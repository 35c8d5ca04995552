//! Rules that keep the bits right, each of which a test may break to see the simulation go red.

/// Which rules hold. Production code uses [`Rules::all`], the only constructor outside tests that
/// break one on purpose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "independent switches of a test")]
pub struct Rules {
    pub(crate) release_at_watermark: bool,
    pub(crate) pull_checks_watermark: bool,
    pub(crate) first_result_wins: bool,
    pub(crate) reserve_takes_complete_bundles: bool,
    pub(crate) pull_checks_incarnation: bool,
    pub(crate) round_rings_again: bool,
}

impl Rules {
    /// Every rule holds.
    pub const fn all() -> Self {
        Self {
            release_at_watermark: true,
            pull_checks_watermark: true,
            first_result_wins: true,
            reserve_takes_complete_bundles: true,
            pull_checks_incarnation: true,
            round_rings_again: true,
        }
    }

    /// All rules but the one named, for tests that show that the simulation sees it.
    ///
    /// # Panics
    ///
    /// When there is no rule of that name.
    #[doc(hidden)]
    pub fn without(name: &str) -> Self {
        let mut rules = Self::all();
        let rule = match name {
            "release at watermark" => &mut rules.release_at_watermark,
            "pull checks watermark" => &mut rules.pull_checks_watermark,
            "first result wins" => &mut rules.first_result_wins,
            "reserve takes complete bundles" => &mut rules.reserve_takes_complete_bundles,
            "pull checks incarnation" => &mut rules.pull_checks_incarnation,
            "round rings again" => &mut rules.round_rings_again,
            other => panic!("no rule is called {other}"),
        };
        *rule = false;
        rules
    }
}

impl Default for Rules {
    fn default() -> Self {
        Self::all()
    }
}

//! One test a rule of the protocol: without the rule, a simulation sees something go wrong.
//!
//! In: `broken_rule_is_seen` of the test program, which takes the name of a rule and fails where nothing goes wrong.
//!
//! `worker/tests/shell` takes this file too.

use crate::broken_rule_is_seen;

#[test]
fn rows_reused_before_the_watermark_are_seen() {
    broken_rule_is_seen("release at watermark");
}

#[test]
fn rows_pulled_after_the_watermark_are_seen() {
    broken_rule_is_seen("pull checks watermark");
}

#[test]
fn results_merged_twice_are_seen() {
    broken_rule_is_seen("first result wins");
}

#[test]
fn incomplete_bundles_in_the_reserve_are_seen() {
    broken_rule_is_seen("reserve takes complete bundles");
}

#[test]
fn results_of_another_incarnation_are_seen() {
    broken_rule_is_seen("pull checks incarnation");
}

#[test]
fn moved_bundles_that_nobody_rings_for_are_seen() {
    broken_rule_is_seen("round rings again");
}

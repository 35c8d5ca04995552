//! Bugs that people write where rows of shared memory are published, found, copied and landed, each as a replacement in one file.
//!
//! In: nothing. Out: the list. Every text stands exactly once in its file, so a change that removes it makes the test say so.

use crate::common::{Planted, planted};

const LAND: &str = "pieces_of_two_regions_of_two_arenas_land_where_they_belong";
const GONE: &str = "what_is_not_published_or_not_inside_does_not_land";
const ANEW: &str = "rows_that_were_published_anew_while_they_were_copied_do_not_count";
const BUSY: &str = "a_landing_is_busy_until_its_copy_is_over_whatever_was_told";
const FAILS: &str = "a_device_that_fails_refuses_the_pull_and_says_so";

const DOOR: &str = "src/node/door.rs";
const LANDINGS: &str = "src/node/landings.rs";
const NODE: &str = "src/node/mod.rs";
const PULLS: &str = "src/node/pulls.rs";

/// All of them.
pub(crate) const PLANTED: &[Planted] = &[
    planted(
        LAND,
        DOOR,
        "whoever asks gets the descriptor of the first arena",
        "arenas.get(&ticket)",
        "arenas.values().next()",
    ),
    planted(
        LAND,
        PULLS,
        "pieces count from the arena and not from the region",
        "remote: it.remote + slip.at",
        "remote: it.remote",
    ),
    planted(
        LAND,
        LANDINGS,
        "two pulls land on the same bytes",
        "if other > piece.local =>",
        "if other > piece.local + 50 =>",
    ),
    planted(
        LAND,
        NODE,
        "an arena is handed out anew for each of its regions",
        "self.tickets.insert(arena, ticket);",
        "",
    ),
    planted(
        GONE,
        PULLS,
        "a piece may reach into the arena behind its region",
        "end <= slip.bytes",
        "end <= slip.arena_bytes",
    ),
    planted(GONE, NODE, "a region that is withdrawn can be found", "self.tcp.withdraw(key);", ""),
    planted(
        ANEW,
        NODE,
        "publications of a place cannot be told apart",
        "publication: self.publications",
        "publication: 1",
    ),
    planted(
        ANEW,
        PULLS,
        "the second look looks at nothing",
        "if slip != *before",
        "if slip.at != before.at",
    ),
    planted(
        BUSY,
        PULLS,
        "a landing is free at the deadline although it is copied to",
        "                pull.told = true;
                self.pulls.insert(id, pull);
                return;",
        "",
    ),
    planted(
        BUSY,
        PULLS,
        "a landing whose pull was late is never free again",
        "        if pull.told {
            self.landings.release(pull.landing, &pull.pieces);",
        "        if pull.told {",
    ),
    planted(
        FAILS,
        PULLS,
        "a copy that failed counts",
        "                Err(why) => Some(Err(why)),",
        "                Err(_) => Some(Ok(())),",
    ),
];

//! How many servers a pool needs.
//!
//! In: what attention and everything else take in a phase. Out: a number of dedicated servers. The operator scales by it,
//! and `cadre plan` sizes a pool by it before there is one.

/// Least servers that finish a phase's attention while the trainers do everything else of it.
///
/// `work` is the attention of all trainers on one server, `room` what one trainer does beside attention, in the same
/// unit of time. Trainers that serve in place have no such room: they do both, and need no server; zero.
///
/// With `busy_percent` below 100 servers keep so much time for what reports do not foresee; zero counts as 1.
pub fn servers_for(work: u64, room: u64, busy_percent: u32, in_place: bool) -> u64 {
    if in_place || work == 0 {
        return 0;
    }
    let busy = u128::from(room.max(1)) * u128::from(busy_percent.clamp(1, 100));
    let servers = (u128::from(work) * 100).div_ceil(busy);
    u64::try_from(servers).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_the_least_that_keep_up() {
        assert_eq!(servers_for(0, 10, 100, false), 0);
        assert_eq!(servers_for(100, 50, 100, false), 2);
        assert_eq!(servers_for(101, 50, 100, false), 3);
        assert_eq!(servers_for(100, 50, 70, false), 3);
        assert_eq!(servers_for(100, 50, 100, true), 0);
        assert_eq!(servers_for(u64::MAX, 0, 0, false), u64::MAX);
    }
}

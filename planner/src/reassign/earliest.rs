//! Who is first of many that are given more and more.
//!
//! In: times of members, which change. Out: the member with the least time of those that fit, and the lowest member of
//! those below a time, each in a number of steps that grows with the logarithm of the members where most of them fit.

/// Members by number with their times, as a tree of minima.
pub(super) struct Earliest {
    /// Ascending.
    members: Vec<usize>,
    /// The root is at 1, the children of `node` are at `2 * node` and the next; the second half are the members.
    times: Vec<u128>,
}

impl Earliest {
    /// From times with their members; members ascend.
    pub(super) fn of(times: Vec<(u128, usize)>) -> Self {
        let leaves = times.len().next_power_of_two();
        let mut tree = vec![u128::MAX; 2 * leaves];
        for (at, (time, _)) in times.iter().enumerate() {
            tree[leaves + at] = *time;
        }
        for node in (1..leaves).rev() {
            tree[node] = tree[2 * node].min(tree[2 * node + 1]);
        }
        Self { members: times.into_iter().map(|it| it.1).collect(), times: tree }
    }

    /// Changes the time of a member.
    pub(super) fn set(&mut self, member: usize, time: u128) {
        let Ok(at) = self.members.binary_search(&member) else {
            return;
        };
        let mut node = self.leaves() + at;
        self.times[node] = time;
        while node > 1 {
            node /= 2;
            self.times[node] = self.times[2 * node].min(self.times[2 * node + 1]);
        }
    }

    /// The member with the least time for which `fits` holds.
    pub(super) fn first(&self, fits: impl Fn(usize) -> bool) -> Option<usize> {
        let (mut best, mut open) = ((u128::MAX, None), vec![1]);
        while let Some(node) = open.pop() {
            if self.times[node] >= best.0 {
                continue;
            }
            if let Some(at) = node.checked_sub(self.leaves()) {
                if fits(self.members[at]) {
                    best = (self.times[node], Some(self.members[at]));
                }
                continue;
            }
            // The earlier child is looked at first.
            let (left, right) = (2 * node, 2 * node + 1);
            let is_left = self.times[left] <= self.times[right];
            open.extend(if is_left { [right, left] } else { [left, right] });
        }
        best.1
    }

    /// The lowest member for which `fits` holds and whose time is below `time`.
    pub(super) fn lowest_below(&self, time: u128, fits: impl Fn(usize) -> bool) -> Option<usize> {
        let mut open = vec![1];
        while let Some(node) = open.pop() {
            if self.times[node] >= time {
                continue;
            }
            match node.checked_sub(self.leaves()) {
                Some(at) if fits(self.members[at]) => return Some(self.members[at]),
                Some(_) => {}
                None => open.extend([2 * node + 1, 2 * node]),
            }
        }
        None
    }

    fn leaves(&self) -> usize {
        self.times.len() / 2
    }
}

//! Lists of different lengths, one behind the other.
//!
//! In: groups in their order, or pairs of a group and what is in it. Out: [`Groups`]. A step has hundreds of thousands of short
//! lists; each as a vector of its own would take three words and a piece of the heap.
//!
//! Invariant: the groups together are the whole list, and each keeps the order in which its members came.

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Groups<T> {
    /// Where each group ends in `all`.
    ends: Vec<u32>,
    all: Vec<T>,
}

impl<T> Default for Groups<T> {
    fn default() -> Self {
        Self { ends: Vec::new(), all: Vec::new() }
    }
}

impl<T: Copy> Groups<T> {
    /// Room for so many groups of one member.
    pub fn with_capacity(groups: usize) -> Self {
        Self { ends: Vec::with_capacity(groups), all: Vec::with_capacity(groups) }
    }

    /// Adds a group behind the others.
    ///
    /// # Panics
    ///
    /// More than 2^32 members.
    pub fn push(&mut self, group: impl IntoIterator<Item = T>) {
        self.all.extend(group);
        self.ends.push(u32::try_from(self.all.len()).expect("a step has fewer works and parcels"));
    }

    /// Puts each member into its group; `pairs` gives the same twice.
    ///
    /// # Panics
    ///
    /// A group from `groups` on; more than 2^32 members.
    pub fn sorted(groups: usize, pairs: impl Iterator<Item = (usize, T)> + Clone) -> Self {
        // Counts first, then where each group begins, then where the next member of each goes.
        let mut ends = vec![0_u32; groups];
        let (mut count, mut any) = (0_u32, None);
        pairs.clone().for_each(|(group, member)| {
            ends[group] += 1;
            count = count.checked_add(1).expect("a step has fewer works and parcels");
            any = Some(member);
        });
        let mut begin = 0;
        for it in &mut ends {
            begin += std::mem::replace(it, begin);
        }
        let mut all = any.map_or_else(Vec::new, |it| vec![it; count as usize]);
        pairs.for_each(|(group, member)| {
            all[ends[group] as usize] = member;
            ends[group] += 1;
        });
        Self { ends, all }
    }

    /// How many groups there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Where a group begins in the list of all members; behind the last one, where that ends.
    pub fn begin(&self, group: usize) -> usize {
        group.checked_sub(1).map_or(0, |before| self.ends[before] as usize)
    }

    /// The members of a group; none of a group that there is not.
    pub fn of(&self, group: usize) -> &[T] {
        match self.ends.get(group) {
            Some(&end) => &self.all[self.begin(group)..end as usize],
            None => &[],
        }
    }

    /// The group of a member, by its place among all.
    pub fn group_of(&self, place: usize) -> usize {
        self.ends.partition_point(|it| *it as usize <= place)
    }

    /// All members, group after group.
    pub fn all(&self) -> &[T] {
        &self.all
    }

    /// Gives back memory that was taken for more.
    pub fn shrink(&mut self) {
        self.ends.shrink_to_fit();
        self.all.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_in_their_groups_in_their_order() {
        for count in 0..40_u32 {
            // Some groups stay empty, also the last ones.
            let pairs =
                (0..count).map(|it| ((it.wrapping_mul(2_654_435_761) >> 29) as usize % 6, it));
            let pairs: Vec<_> = pairs.filter(|it| it.0 != 2).collect();
            let sorted = Groups::sorted(7, pairs.iter().copied());
            let mut pushed = Groups::with_capacity(0);
            for group in 0..7 {
                let expected = pairs.iter().filter(|it| it.0 == group).map(|it| it.1);
                let expected: Vec<u32> = expected.collect();
                pushed.push(expected.iter().copied());
                assert_eq!(sorted.of(group), &expected[..]);
                let begin = sorted.begin(group);
                for place in begin..begin + expected.len() {
                    assert_eq!(sorted.group_of(place), group);
                }
            }
            assert_eq!((sorted.len(), sorted.all().len()), (7, pairs.len()));
            assert!(sorted.of(7).is_empty());
            assert_eq!(sorted, pushed);
        }
    }
}

//! Assignments of a step's bundles, round by round, computed once.
//!
//! In: the fillers of all rounds up to the one that is asked for. Out: the assignment of that round. The
//! caller brings the function that moves bundles from one round to the next; nothing is known of it here
//! but that its result follows from the round before and the fillers.
//!
//! The conductor proposes a round before it sends it, and may propose another in its place: when a
//! second server is lost before the answer, or when a bundle has no slot. What was computed for the
//! older proposal stays here until somebody asks with other fillers.
//!
//! Invariant: an assignment is handed out only for the fillers that it was computed from.

use crate::Fillers;

/// Assignments of type `A` of one step, by round.
#[derive(Clone, Debug)]
pub struct AssignedRounds<A> {
    first: A,
    /// Rounds `1..`, each with the fillers that it was computed from.
    later: Vec<(Fillers, A)>,
}

impl<A> AssignedRounds<A> {
    /// Knows round 0, which the header says.
    pub const fn new(first: A) -> Self {
        Self { first, later: Vec::new() }
    }

    /// The assignment of round 0.
    pub const fn first(&self) -> &A {
        &self.first
    }

    /// The assignment of round `tables.len()`, where `tables` are the fillers of rounds `1..`. `assign`
    /// makes a round from the one before it and the fillers; it is called for rounds that are not known
    /// for these fillers, in order.
    ///
    /// # Errors
    ///
    /// The first of `assign`. The rounds before stay known.
    pub fn after<E>(
        &mut self,
        tables: &[Fillers],
        mut assign: impl FnMut(&A, &Fillers) -> Result<A, E>,
    ) -> Result<&A, E> {
        let same = self.later.iter().zip(tables).take_while(|(known, asked)| known.0 == **asked);
        let same = same.count();
        if same < tables.len() {
            // Beyond them are rounds of a proposal that was superseded.
            self.later.truncate(same);
        }
        for fillers in &tables[same..] {
            let next = assign(self.last(), fillers)?;
            self.later.push((fillers.clone(), next));
        }
        Ok(match tables.len().checked_sub(1) {
            Some(index) => &self.later[index].1,
            None => &self.first,
        })
    }

    fn last(&self) -> &A {
        self.later.last().map_or(&self.first, |it| &it.1)
    }
}

#[cfg(test)]
mod tests {
    use super::AssignedRounds;
    use crate::{Filler, Fillers, ServerId};

    /// Slots filled by these servers, others vacant.
    fn fillers(servers: &[u16]) -> Fillers {
        let server = |index| Filler::Server(ServerId { index, incarnation: 0 });
        (0..4).map(|it| servers.contains(&it).then(|| server(it))).collect()
    }

    /// An assignment that shows what it was made from: the slots filled in every round.
    #[allow(clippy::ptr_arg, reason = "what is kept is a whole vector")]
    fn assign(before: &Vec<usize>, fillers: &Fillers) -> Result<Vec<usize>, &'static str> {
        let filled = fillers.iter().flatten().count();
        let next = before.iter().copied().chain([filled]).collect();
        if filled == 0 { Err("no slot") } else { Ok(next) }
    }

    fn ask(rounds: &mut AssignedRounds<Vec<usize>>, tables: &[Fillers], expected: &[usize]) {
        assert_eq!(rounds.after(tables, assign).map(Vec::as_slice), Ok(expected));
    }

    #[test]
    fn a_superseded_proposal_is_never_used() {
        let mut rounds = AssignedRounds::new(vec![4]);
        let (one_lost, two_lost) = (fillers(&[0, 1, 2]), fillers(&[0, 1]));
        ask(&mut rounds, std::slice::from_ref(&one_lost), &[4, 3]);
        ask(&mut rounds, std::slice::from_ref(&two_lost), &[4, 2]);
        ask(&mut rounds, &[two_lost.clone(), fillers(&[0])], &[4, 2, 1]);
        ask(&mut rounds, &[two_lost, fillers(&[0, 3])], &[4, 2, 2]);
    }

    #[test]
    fn a_proposal_that_has_no_place_leaves_nothing_behind() {
        let mut rounds = AssignedRounds::new(vec![4]);
        assert_eq!(rounds.after(&[fillers(&[])], assign), Err("no slot"));
        ask(&mut rounds, &[fillers(&[3])], &[4, 1]);
        assert_eq!(rounds.first(), &[4]);
    }

    #[test]
    fn a_round_is_computed_once_and_older_ones_stay_known() {
        let mut rounds = AssignedRounds::new(vec![4]);
        let tables = [fillers(&[0, 1, 2]), fillers(&[0, 1])];
        ask(&mut rounds, &tables, &[4, 3, 2]);
        let again = |_: &Vec<usize>, _: &Fillers| Err("computed again");
        assert_eq!(rounds.after(&tables, again).map(Vec::len), Ok(3));
        assert_eq!(rounds.after(&tables[..1], again).map(Vec::len), Ok(2));
        assert_eq!(
            rounds.after(&tables, again).map(Vec::len),
            Ok(3),
            "asking for less forgets none"
        );
        assert_eq!(rounds.after(&[], again).map(Vec::len), Ok(1));
    }
}

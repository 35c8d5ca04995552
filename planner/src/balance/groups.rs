//! What a slot holds of one document: rows by KV-head group.
//!
//! In: spans put and taken. Out: groups. What others rely on: groups of a document do not overlap, and
//! adjacent ones differ in rows; the rows of a group are disjoint, ascending and never touch, so one range
//! is one run of tasks.

use std::ops::Range;

use crate::DocumentId;
use crate::plan::hull;

/// Rows of one document and KV-head group, cut at tiles.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Span {
    pub(super) document: DocumentId,
    pub(super) heads: Range<u16>,
    pub(super) rows: Range<u32>,
}

impl Span {
    /// Other rows of the same document and heads.
    pub(super) fn with_rows(&self, rows: Range<u32>) -> Self {
        Self { rows, ..self.clone() }
    }
}

/// What a bin holds of a document under some KV heads.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Group {
    pub(super) heads: Range<u16>,
    /// Ascending, disjoint, with gaps between them.
    pub(super) rows: Vec<Range<u32>>,
}

/// Adds rows to the groups of their document, splitting groups at the edges of their heads.
pub(super) fn put(groups: &mut Vec<Group>, span: &Span) {
    split(groups, span.heads.start);
    split(groups, span.heads.end);
    let mut next = span.heads.start;
    let mut at = groups.partition_point(|it| it.heads.end <= next);
    while next < span.heads.end {
        let here = groups.get(at).filter(|it| it.heads.start < span.heads.end);
        let start = here.map_or(span.heads.end, |it| it.heads.start);
        if start > next {
            let rows = vec![span.rows.clone()];
            groups.insert(at, Group { heads: next..start, rows });
        } else {
            insert(&mut groups[at].rows, span.rows.clone());
        }
        next = groups[at].heads.end;
        at += 1;
    }
    join(groups);
}

/// Takes rows out of the groups that hold them.
pub(super) fn take(groups: &mut Vec<Group>, span: &Span) {
    split(groups, span.heads.start);
    split(groups, span.heads.end);
    for group in &mut *groups {
        if span.heads.contains(&group.heads.start) {
            remove(&mut group.rows, &span.rows);
        }
    }
    groups.retain(|it| !it.rows.is_empty());
    join(groups);
}

/// Cuts the group that goes across `head`.
fn split(groups: &mut Vec<Group>, head: u16) {
    let at = groups.partition_point(|it| it.heads.end <= head);
    if let Some(group) = groups.get_mut(at).filter(|it| it.heads.start < head) {
        let rest = Group { heads: head..group.heads.end, rows: group.rows.clone() };
        group.heads.end = head;
        groups.insert(at + 1, rest);
    }
}

/// Joins adjacent groups that have the same rows.
fn join(groups: &mut Vec<Group>) {
    groups.dedup_by(|next, last| {
        let same = last.heads.end == next.heads.start && last.rows == next.rows;
        if same {
            last.heads.end = next.heads.end;
        }
        same
    });
}

/// Adds a range to disjoint ascending ranges, merging those that touch.
pub(super) fn insert(rows: &mut Vec<Range<u32>>, new: Range<u32>) {
    let first = rows.partition_point(|it| it.end < new.start);
    let end = rows.partition_point(|it| it.start <= new.end);
    let merged = hull(rows[first..end].iter().chain([&new]));
    rows.splice(first..end, [merged]);
}

/// Takes a range out of disjoint ascending ranges that hold it.
pub(super) fn remove(rows: &mut Vec<Range<u32>>, old: &Range<u32>) {
    let at = rows.partition_point(|it| it.end <= old.start);
    let whole = rows[at].clone();
    let rest = [whole.start..old.start, old.end..whole.end];
    rows.splice(at..=at, rest.into_iter().filter(|it| !it.is_empty()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_merge_where_they_touch_and_split_where_taken() {
        let mut rows = vec![0..2, 4..6];
        insert(&mut rows, 2..4);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0], 0..6);
        insert(&mut rows, 8..9);
        remove(&mut rows, &(2..3));
        assert_eq!(rows, [0..2, 3..6, 8..9]);
        remove(&mut rows, &(3..6));
        remove(&mut rows, &(0..1));
        assert_eq!(rows, [1..2, 8..9]);
    }

    #[test]
    fn groups_part_and_join_with_their_rows() {
        let group = |heads: Range<u16>, rows: Range<u32>| Group { heads, rows: vec![rows] };
        let span = |heads, rows| Span { document: DocumentId(0), heads, rows };
        let mut groups = Vec::new();
        put(&mut groups, &span(0..8, 0..4));
        take(&mut groups, &span(2..4, 1..4));
        assert_eq!(groups, [group(0..2, 0..4), group(2..4, 0..1), group(4..8, 0..4)]);
        put(&mut groups, &span(3..6, 6..7));
        let parts = [0..2, 2..3, 3..4, 4..6, 6..8];
        assert_eq!(groups.iter().map(|it| it.heads.clone()).collect::<Vec<_>>(), parts);
        take(&mut groups, &span(3..6, 6..7));
        put(&mut groups, &span(2..4, 1..4));
        assert_eq!(groups, [group(0..8, 0..4)]);
        take(&mut groups, &span(0..3, 0..4));
        take(&mut groups, &span(5..8, 0..4));
        put(&mut groups, &span(1..8, 9..10));
        let both = Group { heads: 3..5, rows: vec![0..4, 9..10] };
        let parts = [group(1..3, 9..10), both, group(5..8, 9..10)];
        assert_eq!(groups, parts);
    }
}

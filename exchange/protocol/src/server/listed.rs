//! A bundle's parcels or works, in their order.
//!
//! In: the parts, once. Out: one part by its name, or all of them. It decides nothing.
//!
//! A bundle may have thousands of parts, and as many events: what walks over all of them for one event takes the square of their
//! number. So tests count the parts that are looked at ([`looks`]), and there is no way past the count.

#[cfg(test)]
use std::cell::Cell;

#[cfg(test)]
thread_local! {
    static LOOKS: Cell<usize> = const { Cell::new(0) };
}

/// Parts that this thread's servers have looked at since it was asked last.
#[cfg(test)]
pub(super) fn looks() -> usize {
    LOOKS.take()
}

/// So many parts are looked at; or bundles, by who walks over them.
#[cfg_attr(not(test), expect(unused_variables, reason = "only tests count"))]
pub(super) fn look(parts: usize) {
    #[cfg(test)]
    LOOKS.set(LOOKS.get() + parts);
}

/// See the module.
#[derive(Debug)]
pub(super) struct Listed<T>(Vec<T>);

impl<T> Listed<T> {
    /// All parts.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        look(self.0.len());
        self.0.iter()
    }

    /// The part of a name, if it is here.
    pub(super) fn find<K: Ord>(&mut self, name: &K, of: impl Fn(&T) -> K) -> Option<&mut T> {
        look(1);
        let index = self.0.binary_search_by(|it| of(it).cmp(name)).ok()?;
        Some(&mut self.0[index])
    }
}

impl<T> FromIterator<T> for Listed<T> {
    /// The parts ascend by their names.
    fn from_iter<I: IntoIterator<Item = T>>(parts: I) -> Self {
        let parts = Vec::from_iter(parts);
        look(parts.len());
        Self(parts)
    }
}

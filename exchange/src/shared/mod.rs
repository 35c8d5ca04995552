//! Memory of the host that processes of one machine share: arenas that rows lie in, and the board that says where.
//!
//! In: lengths; publications. Out: parts of arenas that buffers are made of, descriptors, and the same seen from another
//! process. No socket here, and no pull: `paths` hands descriptors over and copies.
//!
//! ```text
//! owner                                     reader
//!   arena: sealed memfd, mapped to write      the same, mapped to read
//!   board: sealed memfd                       the same, mapped to read
//!     publish: place, then its number           find: number, place, number again
//!     withdraw: number 0, fence                 copy, fence, number again: still published?
//! ```
//!
//! Invariant: only the process that made it can write a memory of these, and none can make it shorter.

mod arena;
mod board;
mod free;
mod mapping;

pub(crate) use self::arena::Arenas;
pub(crate) use self::board::{BUCKET_BYTES, Board, ENTRY_BYTES, Found, Reading, Spot};
pub(crate) use self::mapping::{Foreign, Part, Stretch};

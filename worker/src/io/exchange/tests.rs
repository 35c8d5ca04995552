//! Landings of TCP.

use cadre_exchange::{Encryption, Limits, Tcp, TcpConfig};

use super::*;

#[test]
fn memory_of_landings_is_used_again() {
    let bind = std::net::Ipv4Addr::LOCALHOST.into();
    let (me, secret, limits) = (PeerId::server(0, 0), [0; 32], Limits::default());
    let encryption = Encryption::Off;
    let config = TcpConfig { bind, me, secret, data_version: 1, encryption, limits };
    let mut links = Tcp::open(config).unwrap();
    let mut again = || {
        let landing = Exchange::land(&mut links, 3 << 20).unwrap();
        let mut room = Exchange::take(&mut links, landing).unwrap();
        let before = room.bytes()[1_000_000];
        room.bytes_mut().fill(7);
        before == 7
    };
    // Other tests of this process take from the same pool, now and then the very piece.
    assert!((0..1_000).any(|_| again()), "every landing had new memory");
}

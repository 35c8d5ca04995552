//! Encryption of links: TLS 1.3 below the greeting.
//!
//! In: whether links are encrypted. Out: both ends of a channel, and a secret that only these two ends know. Each process makes a
//! key when it starts. Nobody certifies the key, and it has no other use. Trust comes from the greeting: both proofs of the job's
//! secret cover the channel's own secret, so a man in the middle has two channels and can prove neither.
//!
//! One version, one cipher and one group: nothing is negotiated. rustls with ring does it, as for the control service.
//!
//! Invariant: a channel is good for one link; nothing of it is resumed.

use std::fmt;
use std::sync::Arc;

use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::crypto::ring::kx_group::X25519;
use rustls::crypto::ring::sign::any_eddsa_type;
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, Error, ServerConfig,
    ServerConnection, SignatureScheme,
};

/// Label with which the secret of a channel is derived.
const LABEL: &[u8] = b"EXPORTER cadre exchange";
/// Bytes of a channel that wait for the socket.
const UNSENT_BYTES: usize = 256 << 10;

/// What is encrypted. All processes of a job have to say the same.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Encryption {
    /// Nothing: frames travel as they are.
    #[default]
    Off,
    /// Links, by TLS 1.3. Rows may take paths that encrypt nothing.
    Tcp,
    /// As above, and no row crosses a network in the clear.
    Required,
}

/// Secret that only the two ends of a channel know; none without TLS.
pub(super) type ChannelSecret = Option<[u8; 32]>;

/// Makes ends of channels.
#[derive(Clone)]
pub(super) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// With a key of its own, if links are to be encrypted.
    pub(super) fn of(encryption: Encryption) -> Option<Self> {
        match encryption {
            Encryption::Off => None,
            Encryption::Tcp | Encryption::Required => {
                Some(Self::new().expect("rustls has what this file names"))
            }
        }
    }

    fn new() -> Result<Self, Error> {
        let crypto = Arc::new(CryptoProvider {
            cipher_suites: vec![TLS13_AES_128_GCM_SHA256],
            kx_groups: vec![X25519],
            ..rustls::crypto::ring::default_provider()
        });
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new())
            .map_err(|_| Error::FailedToGetRandomBytes)?;
        let key = any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8.as_ref()))?;
        let public = key.public_key().ok_or(Error::General("a key without a public one".into()))?;
        let shown = CertificateDer::from(public.to_vec());
        let resolver =
            AlwaysResolvesServerRawPublicKeys::new(Arc::new(CertifiedKey::new(vec![shown], key)));
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&crypto))
            .with_protocol_versions(&[&TLS13])?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(resolver));
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&crypto))
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyKey { crypto }))
            .with_no_client_auth();
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }

    /// The connecting end.
    pub(super) fn opener(&self) -> Connection {
        let name = ServerName::try_from("cadre").expect("a name");
        let client = ClientConnection::new(Arc::clone(&self.client), name);
        bounded(client.expect("what is configured fits together").into())
    }

    /// The listening end.
    pub(super) fn acceptor(&self) -> Connection {
        let server = ServerConnection::new(Arc::clone(&self.server));
        bounded(server.expect("what is configured fits together").into())
    }
}

fn bounded(mut connection: Connection) -> Connection {
    connection.set_buffer_limit(Some(UNSENT_BYTES));
    connection
}

/// The secret of a channel whose handshake is over.
pub(super) fn secret(connection: &Connection) -> Result<[u8; 32], Error> {
    connection.export_keying_material([0; 32], LABEL, None)
}

/// Accepts any key whose owner holds it. The greeting then proves who the owner is.
#[derive(Debug)]
struct AnyKey {
    crypto: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _key: &CertificateDer<'_>,
        _others: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken here".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        let algorithms = &self.crypto.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature_with_raw_key(message, &key, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl fmt::Debug for Tls {
    /// Without the key.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Tls")
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::super::door::Stranger;
    use super::super::greeting::{GreetingError, Identity, Purpose};
    use super::super::opening::{Opened, Opening};
    use super::super::socket::LinkError;
    use super::super::stream::Stream;
    use super::*;
    use crate::peer::PeerId;

    fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let one = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (two, _) = listener.accept().expect("just connected");
        for stream in [&one, &two] {
            stream.set_nonblocking(true).expect("a socket of ours");
        }
        (one, two)
    }

    fn identity(me: PeerId) -> Identity {
        let (secret, purpose) = ([9; 32], Purpose::Exchange);
        Identity { me, secret, data_version: 1, purpose, tls: Tls::of(Encryption::Tcp) }
    }

    /// Passes on what one channel says to the other, readable for whoever holds both.
    fn pass(from: &mut Stream, to: &mut Stream) {
        use std::io::{Read as _, Write as _};
        let mut bytes = [0; 256];
        if let Ok(count) = from.read(&mut bytes) {
            to.write_all(&bytes[..count]).expect("there is room");
        }
        // A handshake may not be over yet.
        let _ = to.flush();
    }

    #[test]
    fn who_stands_between_two_processes_with_two_channels_can_prove_neither() {
        let (opener, acceptor) = (PeerId::server(0, 0), PeerId::trainer(0, 0));
        let (ours, theirs) = (identity(opener), identity(acceptor));
        // Who stands between has channels, as anybody can, and passes on every word of the greeting, but does not know the secret.
        let between = Tls::new().expect("as ours");
        let (one, two) = sockets();
        let (three, four) = sockets();
        let (mut one, mut two) =
            (Stream::opener(one, ours.tls.as_ref()), Stream::acceptor(two, Some(&between)));
        let (mut three, four) =
            (Stream::opener(three, Some(&between)), Stream::acceptor(four, theirs.tls.as_ref()));
        let address = "127.0.0.1:1".parse().expect("an address");
        let (mut opening, mut stranger) = (Opening::new(acceptor), Stranger::new(four, address));
        let mut rounds = 0..1_000_000;
        let error = rounds.find_map(|_| {
            pass(&mut two, &mut three);
            let said = stranger.advance(&theirs, || [2; 32]);
            assert!(matches!(said, Ok(None)), "it waits for a proof that never comes: {said:?}");
            pass(&mut three, &mut two);
            match opening.advance(&mut one, &ours, || [1; 32]) {
                Ok(opened) => {
                    assert_eq!(opened, Opened::NotYet);
                    None
                }
                Err(error) => Some(error),
            }
        });
        let is_secret = matches!(error, Some(LinkError::Greeting(GreetingError::Secret)));
        assert!(is_secret, "{error:?}");
        assert!(stranger.has_greeted(), "every word before the proofs came through");
    }
}

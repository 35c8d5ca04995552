//! Reads the end of validity of certificates.
//!
//! In: a PEM file with one or more certificates. Out: the earliest end of validity. Nothing else is read, and no signature is
//! checked.

use std::path::Path;

use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;

/// Tags of DER.
const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const SHORT_YEAR: u8 = 0x17;
const LONG_YEAR: u8 = 0x18;

/// The earliest end of validity in a file, in seconds since 1970. None where the file holds no certificate, or something else.
pub fn good_until(file: &Path) -> Option<i64> {
    let all = CertificateDer::pem_file_iter(file).ok()?.collect::<Result<Vec<_>, _>>().ok()?;
    all.iter().map(|it| end(it)).collect::<Option<Vec<_>>>()?.into_iter().min()
}

/// The certificates of a PEM text that are valid after `time`, in seconds since 1970, each with its text unchanged. What is no
/// certificate is left out.
pub fn good_after(text: &str, time: i64) -> Vec<&str> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    let blocks = text.match_indices(BEGIN).filter_map(|(at, _)| {
        let rest = text.get(at..)?;
        rest.get(..rest.find(END)? + END.len())
    });
    let is_good = |it: &&str| {
        let certificate = CertificateDer::from_pem_slice(it.as_bytes());
        certificate.is_ok_and(|it| end(&it).is_some_and(|it| it > time))
    };
    blocks.filter(is_good).collect()
}

/// The `notAfter` of a certificate: the second time in the fourth part after the version (RFC 5280, 4.1).
fn end(certificate: &[u8]) -> Option<i64> {
    let inside = |bytes| part(bytes).filter(|it| it.0 == SEQUENCE).map(|it| it.1);
    let mut left = inside(inside(certificate)?)?;
    if left.first() == Some(&VERSION) {
        left = part(left)?.2;
    }
    // Serial number, signature algorithm, issuer.
    for _ in 0..3 {
        left = part(left)?.2;
    }
    let (_, _, after) = part(inside(left)?)?;
    let (tag, text, _) = part(after)?;
    time(tag, std::str::from_utf8(text).ok()?)
}

/// Splits off the first DER part: its tag, its content, and the bytes behind it.
fn part(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, first], left) = bytes.split_first_chunk()?;
    let (length, left) = if first < 0x80 {
        (usize::from(first), left)
    } else {
        let (length, left) = left.split_at_checked(usize::from(first & 0x7f))?;
        if length.len() > 4 {
            return None;
        }
        (length.iter().fold(0, |sum, it| sum << 8 | usize::from(*it)), left)
    };
    let (content, left) = left.split_at_checked(length)?;
    Some((tag, content, left))
}

/// `YYMMDDHHMMSSZ`, or with four digits of the year, in seconds since 1970.
fn time(tag: u8, text: &str) -> Option<i64> {
    let years = match tag {
        SHORT_YEAR => 2,
        LONG_YEAR => 4,
        _ => return None,
    };
    let (year, rest) = text.strip_suffix('Z')?.split_at_checked(years)?;
    let year: i64 = year.parse().ok()?;
    let year = match (tag, year) {
        (SHORT_YEAR, 0..50) => 2000 + year,
        (SHORT_YEAR, _) => 1900 + year,
        _ => year,
    };
    let mut two = [0_i64; 5];
    for (at, value) in two.iter_mut().enumerate() {
        *value = rest.get(2 * at..2 * at + 2)?.parse().ok()?;
    }
    let [month, day, hour, minute, second] = two;
    // Days of the proleptic Gregorian calendar, in years that begin in March.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year.div_euclid(4) - year.div_euclid(100)
        + year.div_euclid(400)
        + (153 * month + 2) / 5
        + day
        - 1
        - 719_468;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    #[test]
    fn the_certificate_that_ends_first_is_told_and_what_is_none_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tls.crt");
        let check = |ends: &[(i32, u8, u8)], expected: Option<i64>| {
            let pem = ends.iter().map(|&(year, month, day)| {
                let mut params = CertificateParams::new(vec!["a".to_owned()]).unwrap();
                params.not_after = date_time_ymd(year, month, day);
                params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem()
            });
            std::fs::write(&file, pem.collect::<String>()).unwrap();
            assert_eq!(good_until(&file), expected, "{ends:?}");
        };
        check(&[(2026, 11, 23)], Some(1_795_392_000));
        check(&[(2024, 2, 29)], Some(1_709_164_800));
        // Four digits of the year, and the shorter one in the middle.
        check(&[(2120, 3, 1), (2051, 1, 1), (2099, 12, 31)], Some(2_556_144_000));
        check(&[], None);
        for text in ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "x"] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(good_until(&file), None, "{text}");
        }
        assert_eq!(good_until(&folder.path().join("nowhere")), None);
    }

    #[test]
    fn certificates_that_are_good_are_picked_out_of_a_text() {
        let made = |year: i32| {
            let mut params = CertificateParams::new(vec!["a".to_owned()]).unwrap();
            params.not_after = date_time_ymd(year, 2, 29);
            params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem().trim().to_owned()
        };
        let (over, good, later) = (made(2020), made(2024), made(2096));
        let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----";
        let text = format!("words\n{over}\n{good}{broken}\n{later}\n-----BEGIN CERTIFICATE-----");
        assert_eq!(good_after(&text, 1_700_000_000), [&good, &later]);
        assert_eq!(good_after(&text, 1_709_164_800), [&later], "it is over in that second");
        assert_eq!(good_after("", 0), [""; 0]);
    }
}

//! The authority of a SplitModel and the certificates of its stages, in Secrets. The operator may read Secrets by name only,
//! so what it has seen is remembered.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PublicKeyData as _,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::json;

use crate::apply::{ApplyError, FIELD_MANAGER};
use crate::children::Owner;
use crate::metrics::Metrics;
use crate::names;
use crate::reason::{NotReady, Reason};

/// Annotation on a certificate's Secret: names the authority and the end of the certificate.
const ISSUED: &str = "splitmodel.dev/issued-by";
/// See [`ISSUED`].
const EXPIRES: &str = "splitmodel.dev/expires";
/// Days that a stage's certificate is valid.
const DAYS: i64 = 365;
/// It is replaced when it has less than this.
const RENEW_DAYS: i64 = 120;
/// Days of the authority.
const CA_DAYS: i64 = 3650;
/// What was seen is looked at again after this long.
const LOOK_AGAIN: SignedDuration = SignedDuration::from_mins(10);

/// Why certificates cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("a certificate cannot be made: {0}")]
pub struct CertificateError(#[from] rcgen::Error);

/// Certificate and key of a client of the chain's control services, PEM.
#[derive(Clone)]
pub struct ClientIdentity {
    /// The authority.
    pub ca: String,
    /// The certificate.
    pub cert: String,
    /// Its key.
    pub key: String,
}

/// An authority that signs.
struct Authority {
    cert: String,
    key: String,
}

impl Authority {
    fn generate(owner: &Owner, now: Timestamp) -> Result<Self, CertificateError> {
        let key = KeyPair::generate()?;
        let cert = ca_params(owner, now)?.self_signed(&key)?;
        Ok(Self { cert: cert.pem(), key: key.serialize_pem() })
    }

    /// Whether it can sign: what is signed with another key is refused by every stage.
    fn is_whole(&self) -> bool {
        is_pair(&self.cert, &self.key)
    }

    /// What of it goes into annotations.
    fn fingerprint(&self) -> String {
        names::short_hash(self.cert.as_bytes())
    }

    /// A certificate for `dns`, and its key.
    fn issue(&self, owner: &Owner, dns: &str, now: Timestamp) -> Result<(String, String), CertificateError> {
        // A certificate names its issuer by name and key: the other fields of the authority's own do not matter here.
        let issuer = Issuer::new(ca_params(owner, now)?, KeyPair::from_pem(&self.key)?);
        let mut params = CertificateParams::new(vec![dns.to_owned()])?;
        params.distinguished_name.push(DnType::OrganizationName, "splitmodel");
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        (params.not_before, params.not_after) = validity(now, DAYS);
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &issuer)?;
        Ok((cert.pem(), key.serialize_pem()))
    }
}

/// Whether `cert` is a certificate, and of this `key`; both PEM.
fn is_pair(cert: &str, key: &str) -> bool {
    let Ok(key) = KeyPair::from_pem(key) else { return false };
    let Ok(cert) = CertificateDer::from_pem_slice(cert.as_bytes()) else { return false };
    // A certificate holds its key's public half as it is encoded by itself.
    let public = key.subject_public_key_info();
    cert.windows(public.len()).any(|part| part == public)
}

fn ca_params(owner: &Owner, now: Timestamp) -> Result<CertificateParams, CertificateError> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.distinguished_name.push(DnType::OrganizationName, "splitmodel");
    params.distinguished_name.push(DnType::CommonName, format!("{}.{}", owner.name, owner.namespace));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign];
    (params.not_before, params.not_after) = validity(now, CA_DAYS);
    Ok(params)
}

fn validity(now: Timestamp, days: i64) -> (time::OffsetDateTime, time::OffsetDateTime) {
    let at = |t: i64| time::OffsetDateTime::from_unix_timestamp(t).unwrap_or(time::OffsetDateTime::UNIX_EPOCH);
    let now = now.as_second();
    // Clocks of nodes differ.
    (at(now - 86_400), at(now + days * 86_400))
}

/// What was seen of one Secret.
struct Seen {
    issuer: String,
    expires: Timestamp,
    at: Timestamp,
}

#[derive(Default)]
struct Known {
    authority: Option<Authority>,
    seen: BTreeMap<String, Seen>,
    client: Option<(ClientIdentity, Timestamp)>,
}

/// Certificates of all SplitModels, by the uid of each.
#[derive(Default)]
pub struct Certificates {
    known: Mutex<HashMap<String, Known>>,
}

impl Certificates {
    /// Makes the certificates of `stages` (chain, stage) where they are missing or end soon.
    ///
    /// # Errors
    /// [`ApplyError`].
    pub async fn ensure(
        &self,
        (client, metrics): (&Client, &Metrics),
        owner: &Owner,
        stages: &[(u32, usize)],
        now: Timestamp,
    ) -> Result<(), ApplyError> {
        let api: Api<Secret> = Api::namespaced(client.clone(), &owner.namespace);
        let wanting: Vec<_> = {
            let mut known = self.lock();
            let known = known.entry(owner.uid.clone()).or_default();
            let issuer = known.authority.as_ref().map(Authority::fingerprint);
            let fresh = |seen: &Seen| {
                Some(&seen.issuer) == issuer.as_ref()
                    && now.duration_since(seen.at) < LOOK_AGAIN
                    && seen.expires.duration_since(now) > days(RENEW_DAYS)
            };
            let name = |(chain, stage): &(u32, usize)| names::tls(&owner.name, *chain, *stage);
            stages.iter().filter(|s| !known.seen.get(&name(s)).is_some_and(fresh)).copied().collect()
        };
        if wanting.is_empty() {
            return Ok(());
        }
        let authority = self.authority(&api, metrics, owner, now).await?;
        for (chain, stage) in wanting {
            let name = names::tls(&owner.name, chain, stage);
            let seen = match look(&api, &name, owner, &authority).await? {
                Some(seen) if seen.0 == authority.fingerprint() && seen.1.duration_since(now) > days(RENEW_DAYS) => {
                    seen
                }
                _ => {
                    let dns = names::dns(&owner.name, &owner.namespace, chain, stage);
                    let (cert, key) = authority.issue(owner, &dns, now).map_err(broken)?;
                    let expires = now + days(DAYS);
                    let labels = names::stage_labels(&owner.name, chain, stage);
                    let issued = (authority.fingerprint(), expires);
                    let data = [("ca.crt", authority.cert.as_str()), ("tls.crt", &cert), ("tls.key", &key)];
                    metrics.write("Secret");
                    let secret = secret(owner, &name, labels, &data, Some(&issued));
                    let params = PatchParams::apply(FIELD_MANAGER).force();
                    api.patch(&name, &params, &Patch::Apply(&secret)).await?;
                    issued
                }
            };
            let seen = Seen { issuer: seen.0, expires: seen.1, at: now };
            self.lock().entry(owner.uid.clone()).or_default().seen.insert(name, seen);
        }
        Ok(())
    }

    /// Has all Secrets of a SplitModel looked at again: one of them is missed.
    pub fn look_again(&self, uid: &str) {
        if let Some(known) = self.lock().get_mut(uid) {
            known.seen.clear();
        }
    }

    /// The operator's own certificate for the control services of `owner`'s stages, once there is an authority.
    #[must_use]
    pub fn client(&self, owner: &Owner, now: Timestamp) -> Option<ClientIdentity> {
        let mut known = self.lock();
        let known = known.get_mut(&owner.uid)?;
        let authority = known.authority.as_ref()?;
        if let Some((identity, expires)) = &known.client
            && identity.ca == authority.cert
            && expires.duration_since(now) > days(RENEW_DAYS)
        {
            return Some(identity.clone());
        }
        let (cert, key) = authority.issue(owner, "splitmodel-operator", now).ok()?;
        let identity = ClientIdentity { ca: authority.cert.clone(), cert, key };
        known.client = Some((identity.clone(), now + days(DAYS)));
        Some(identity)
    }

    /// Forgets a SplitModel that is gone.
    pub fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// Deletes the certificate of a stage that is gone.
    ///
    /// # Errors
    /// [`ApplyError`].
    pub async fn remove(&self, client: &Client, owner: &Owner, name: &str) -> Result<(), ApplyError> {
        let api: Api<Secret> = Api::namespaced(client.clone(), &owner.namespace);
        if let Some(known) = self.lock().get_mut(&owner.uid) {
            known.seen.remove(name);
        }
        match api.delete(name, &DeleteParams::default()).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The authority as it stands in its Secret; makes it if there is none.
    async fn authority(
        &self,
        api: &Api<Secret>,
        metrics: &Metrics,
        owner: &Owner,
        now: Timestamp,
    ) -> Result<Authority, ApplyError> {
        let name = names::ca(&owner.name);
        let read = match api.get_opt(&name).await? {
            Some(found) => found,
            None => {
                let made = Authority::generate(owner, now).map_err(broken)?;
                let data = [("ca.crt", made.cert.as_str()), ("ca.key", made.key.as_str())];
                let secret = secret(owner, &name, names::labels(&owner.name), &data, None);
                metrics.write("Secret");
                // A create fails if another was quicker; an apply would replace its key.
                let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
                let secret: Secret = serde_json::from_value(secret).map_err(kube::Error::SerdeError)?;
                api.create(&params, &secret).await?
            }
        };
        own(&read, owner)?;
        let found = text(&read, "ca.crt").zip(text(&read, "ca.key"));
        let found = found.map(|(cert, key)| Authority { cert: cert.to_owned(), key: key.to_owned() });
        let damaged = || {
            let message =
                format!("Secret {name} holds no authority (ca.crt and ca.key); delete it, and it is made anew");
            ApplyError::NotReady(NotReady::new(Reason::Refused, message))
        };
        let authority = found.filter(Authority::is_whole).ok_or_else(damaged)?;
        let kept = Authority { cert: authority.cert.clone(), key: authority.key.clone() };
        self.lock().entry(owner.uid.clone()).or_default().authority = Some(kept);
        Ok(authority)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn days(n: i64) -> SignedDuration {
    SignedDuration::from_hours(24 * n)
}

fn broken(error: CertificateError) -> ApplyError {
    ApplyError::NotReady(NotReady::new(Reason::Refused, error.to_string()))
}

/// Refuses a Secret of somebody else.
fn own(secret: &Secret, owner: &Owner) -> Result<(), ApplyError> {
    if secret.owner_references().iter().any(|r| r.uid == owner.uid) {
        return Ok(());
    }
    let ours = secret.labels().get(names::MODEL) == Some(&owner.name);
    let (reason, what) = if ours {
        (Reason::OldChildren, "of a former SplitModel of this name is still being deleted")
    } else {
        (Reason::NameTaken, "belongs to somebody else; delete it, or give the SplitModel another name")
    };
    Err(ApplyError::NotReady(NotReady::new(reason, format!("Secret {} {what}", secret.name_any()))))
}

/// One entry of a Secret, where it is text.
fn text<'a>(secret: &'a Secret, key: &str) -> Option<&'a str> {
    let ByteString(bytes) = secret.data.as_ref()?.get(key)?;
    std::str::from_utf8(bytes).ok()
}

/// Issuer and end of a certificate that stages can use.
async fn look(
    api: &Api<Secret>,
    name: &str,
    owner: &Owner,
    authority: &Authority,
) -> Result<Option<(String, Timestamp)>, ApplyError> {
    let Some(secret) = api.get_opt(name).await? else { return Ok(None) };
    own(&secret, owner)?;
    let issuer = secret.annotations().get(ISSUED).cloned();
    let expires = secret.annotations().get(EXPIRES).and_then(|t| t.parse().ok());
    let whole = text(&secret, "ca.crt") == Some(authority.cert.as_str())
        && text(&secret, "tls.crt").zip(text(&secret, "tls.key")).is_some_and(|(cert, key)| is_pair(cert, key));
    Ok(issuer.zip(expires).filter(|_| whole))
}

fn secret(
    owner: &Owner,
    name: &str,
    labels: BTreeMap<String, String>,
    data: &[(&str, &str)],
    issued: Option<&(String, Timestamp)>,
) -> serde_json::Value {
    let data: BTreeMap<&str, ByteString> =
        data.iter().map(|(key, text)| (*key, ByteString(text.as_bytes().to_vec()))).collect();
    let mut secret = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": labels,
            "ownerReferences": [owner.reference()],
        },
        "type": "Opaque",
        "data": data,
    });
    if let Some((issuer, expires)) = issued {
        secret["metadata"]["annotations"] = json!({ISSUED: issuer, EXPIRES: expires.to_string()});
    }
    secret
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_signed_by_the_authority_that_is_read_back() {
        let owner = Owner { name: "m".into(), namespace: "n".into(), uid: "u".into() };
        let now = Timestamp::now();
        let made = Authority::generate(&owner, now).unwrap();
        let read = Authority { cert: made.cert.clone(), key: made.key.clone() };
        // Issued later than the authority was made.
        let (cert, _) = read.issue(&owner, "m-0-1.n.svc", now + days(30)).unwrap();
        let pem = |text: &str| x509_parser::pem::parse_x509_pem(text.as_bytes()).unwrap().1;
        let (ca, leaf) = (pem(&made.cert), pem(&cert));
        let (ca, leaf) = (ca.parse_x509().unwrap(), leaf.parse_x509().unwrap());
        assert_eq!(leaf.issuer(), ca.subject());
        leaf.verify_signature(Some(ca.public_key())).unwrap();
        let names = leaf.subject_alternative_name().unwrap().unwrap();
        assert!(format!("{:?}", names.value).contains("m-0-1.n.svc"));
        assert!(leaf.extended_key_usage().unwrap().unwrap().value.client_auth);
    }

    #[test]
    fn an_authority_that_is_none_is_seen() {
        let owner = Owner { name: "m".into(), namespace: "n".into(), uid: "u".into() };
        let (one, two) = (Authority::generate(&owner, Timestamp::now()), Authority::generate(&owner, Timestamp::now()));
        let (one, two) = (one.unwrap(), two.unwrap());
        let of = |cert: &str, key: &str| Authority { cert: cert.to_owned(), key: key.to_owned() }.is_whole();
        assert!(of(&one.cert, &one.key) && of(&two.cert, &two.key));
        assert!(!of("garbage", &one.key) && !of(&one.cert, "garbage") && !of(&two.cert, &one.key));
    }
}

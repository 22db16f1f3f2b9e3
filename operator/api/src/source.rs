//! Where a model comes from.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Longest source.
pub(crate) const MAX_SOURCE: usize = 2048;

/// A parsed `spec.model.source`. `Display` gives the text back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// `hf://owner/repo[@revision]/path/model.gguf`: a repository on Hugging Face.
    Hf {
        /// Owner of the repository.
        owner: String,
        /// Repository.
        repo: String,
        /// Branch, tag or commit; absent: `main`.
        revision: Option<String>,
        /// File in the repository.
        path: String,
    },
    /// `https://host/path`.
    Https {
        /// The whole address.
        url: String,
    },
    /// `pvc://claim/path`: a file on a PersistentVolumeClaim of the namespace.
    Pvc {
        /// The claim.
        claim: String,
        /// File on it.
        path: String,
    },
    /// `oci://image@sha256:digest#path`: a file in an image, mounted as a volume.
    Oci {
        /// Registry and repository, with a tag if one was given.
        image: String,
        /// `sha256:` and 64 hexadecimal digits.
        digest: String,
        /// File in the image.
        path: String,
    },
    /// `file://path`: a file of this machine, for local runs; relative paths start at the manifest's directory.
    File {
        /// The path as written.
        path: PathBuf,
    },
}

/// Why a text is no model source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Nothing, or too much.
    #[error("must have 1 to {MAX_SOURCE} characters, not {0}")]
    Length(usize),
    /// Spaces and control characters.
    #[error("must not contain spaces or control characters; write them as %20 and the like")]
    Characters,
    /// No scheme at all.
    #[error(
        "needs a scheme: hf://owner/repo/file.gguf, https://, pvc://claim/path, oci://image@sha256:…#path or file://"
    )]
    NoScheme,
    /// A scheme that is not known.
    #[error("has the unknown scheme {0}://; known are hf, https, pvc, oci and file")]
    UnknownScheme(String),
    /// The parts after the scheme are not as the scheme wants them.
    #[error("must look like {expected}: {reason}")]
    Form {
        /// An example.
        expected: &'static str,
        /// What is wrong.
        reason: &'static str,
    },
    /// `..` in a path.
    #[error("must not contain '..' in its path")]
    Parent,
}

const HF: &str = "hf://owner/repo/file.gguf or hf://owner/repo@revision/file.gguf";
const HTTPS: &str = "https://host/path/file.gguf";
const PVC: &str = "pvc://claim/path/file.gguf";
const OCI: &str = "oci://registry/image@sha256:<64 hex digits>#path/file.gguf";
const FILE: &str = "file://path/file.gguf";

fn form<T>(expected: &'static str, reason: &'static str) -> Result<T, SourceError> {
    Err(SourceError::Form { expected, reason })
}

impl FromStr for ModelSource {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<Self, SourceError> {
        if text.is_empty() || text.chars().count() > MAX_SOURCE {
            return Err(SourceError::Length(text.chars().count()));
        }
        if text.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(SourceError::Characters);
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(SourceError::NoScheme);
        };
        let source = match scheme {
            "hf" => hf(rest),
            "https" => https(text, rest),
            "pvc" => pvc(rest),
            "oci" => oci(rest),
            "file" if rest.is_empty() || rest.ends_with('/') => form(FILE, "the path of a file is missing"),
            "file" if rest.starts_with('~') => form(FILE, "'~' is not expanded; write the whole path"),
            "file" => Ok(Self::File { path: rest.into() }),
            "" => Err(SourceError::NoScheme),
            other => Err(SourceError::UnknownScheme(other.chars().take(20).collect())),
        }?;
        // Paths inside claims, images and repositories stay inside.
        match &source {
            Self::Hf { .. } | Self::Pvc { .. } | Self::Oci { .. } if rest.split(['/', '#']).any(|s| s == "..") => {
                Err(SourceError::Parent)
            }
            _ => Ok(source),
        }
    }
}

/// A path with a name at its end and no empty parts.
fn is_file(path: &str) -> bool {
    path.split('/').all(|s| !s.is_empty())
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn hf(rest: &str) -> Result<ModelSource, SourceError> {
    let mut parts = rest.splitn(3, '/');
    let (Some(owner), Some(repo), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
        return form(HF, "owner, repository and file are needed");
    };
    let (repo, revision) = match repo.split_once('@') {
        Some((repo, revision)) => (repo, Some(revision)),
        None => (repo, None),
    };
    if !is_word(owner) || !is_word(repo) || revision.is_some_and(|r| !is_word(r)) {
        return form(HF, "owner, repository and revision may have letters, digits, '-', '_' and '.'");
    }
    if !is_file(path) {
        return form(HF, "the path of a file is missing");
    }
    Ok(ModelSource::Hf {
        owner: owner.into(),
        repo: repo.into(),
        revision: revision.map(Into::into),
        path: path.into(),
    })
}

fn https(text: &str, rest: &str) -> Result<ModelSource, SourceError> {
    let Some((host, path)) = rest.split_once('/') else {
        return form(HTTPS, "the path of a file is missing");
    };
    if host.contains('@') {
        return form(HTTPS, "passwords belong into the Secret named by credentialsSecret");
    }
    if host.is_empty() || !host.chars().all(|c| c.is_ascii_alphanumeric() || "-.:[]".contains(c)) {
        return form(HTTPS, "the host is missing or has characters that no host has");
    }
    if path.is_empty() {
        return form(HTTPS, "the path of a file is missing");
    }
    Ok(ModelSource::Https { url: text.into() })
}

/// Whether `text` can be the name of an object: lower-case letters, digits, `-` and `.`.
pub(crate) fn is_object_name(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let end = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.len() <= 253 && text.chars().all(inner) && text.starts_with(end) && text.ends_with(end)
}

fn pvc(rest: &str) -> Result<ModelSource, SourceError> {
    let Some((claim, path)) = rest.split_once('/') else {
        return form(PVC, "the path of a file on the claim is missing");
    };
    if !is_object_name(claim) {
        return form(PVC, "the claim's name may have lower-case letters, digits, '-' and '.'");
    }
    if !is_file(path) {
        return form(PVC, "the path of a file on the claim is missing");
    }
    Ok(ModelSource::Pvc { claim: claim.into(), path: path.into() })
}

fn oci(rest: &str) -> Result<ModelSource, SourceError> {
    let Some((image, path)) = rest.split_once('#') else {
        return form(OCI, "'#' and the path of a file in the image are missing");
    };
    let Some((image, digest)) = image.split_once('@') else {
        return form(OCI, "'@sha256:' and the digest are missing; tags can move");
    };
    let hex = digest.strip_prefix("sha256:").unwrap_or_default();
    if hex.len() != 64 || !hex.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c)) {
        return form(OCI, "the digest must be sha256: and 64 lower-case hexadecimal digits");
    }
    let ok = |c: char| c.is_ascii_alphanumeric() || "-_.:/".contains(c);
    if image.is_empty() || !image.chars().all(ok) {
        return form(OCI, "the image is missing or has characters that no image has");
    }
    if !is_file(path) {
        return form(OCI, "the path of a file in the image is missing");
    }
    Ok(ModelSource::Oci { image: image.into(), digest: digest.into(), path: path.into() })
}

impl ModelSource {
    /// The scheme.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        match self {
            Self::Hf { .. } => "hf",
            Self::Https { .. } => "https",
            Self::Pvc { .. } => "pvc",
            Self::Oci { .. } => "oci",
            Self::File { .. } => "file",
        }
    }

    /// The local file, relative paths taken from `base` (the manifest's directory); `None` for other sources.
    #[must_use]
    pub fn local_path(&self, base: &Path) -> Option<PathBuf> {
        match self {
            Self::File { path } => Some(base.join(path)),
            _ => None,
        }
    }

    /// The address to download from; `None` for sources that are mounted or local.
    #[must_use]
    pub fn url(&self) -> Option<String> {
        match self {
            Self::Hf { owner, repo, revision, path } => {
                let revision = revision.as_deref().unwrap_or("main");
                Some(format!("https://huggingface.co/{owner}/{repo}/resolve/{revision}/{path}"))
            }
            Self::Https { url } => Some(url.clone()),
            _ => None,
        }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hf { owner, repo, revision: None, path } => write!(f, "hf://{owner}/{repo}/{path}"),
            Self::Hf { owner, repo, revision: Some(r), path } => write!(f, "hf://{owner}/{repo}@{r}/{path}"),
            Self::Https { url } => f.write_str(url),
            Self::Pvc { claim, path } => write!(f, "pvc://{claim}/{path}"),
            Self::Oci { image, digest, path } => write!(f, "oci://{image}@{digest}#{path}"),
            Self::File { path } => write!(f, "file://{}", path.display()),
        }
    }
}

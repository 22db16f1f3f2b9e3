//! A model: one GGUF file, or all shards of one.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::header::{Header, TensorInfo};
use crate::{Error, Family, FileSource, Result, Source, families};

/// A model whose headers have been read and checked.
pub struct Model {
    shards: Vec<Shard>,
    by_name: HashMap<String, (usize, usize)>,
    arch: String,
    digest: String,
}

struct Shard {
    source: Arc<dyn Source>,
    header: Header,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("file", &self.file()).field("digest", &self.digest).finish_non_exhaustive()
    }
}

/// A tensor and the shard that holds it.
#[derive(Debug, Clone, Copy)]
pub struct TensorRef<'a> {
    /// Index of the shard, from 0.
    pub shard: usize,
    /// Name, shape, type and place in the shard.
    pub info: &'a TensorInfo,
}

/// `PREFIX-00001-of-00003.gguf` → (prefix, 1, 3).
fn shard_name(path: &Path) -> Option<(&str, u32, u32)> {
    let stem = path.to_str()?.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, index) = rest.rsplit_once('-')?;
    let number = |s: &str| (s.len() == 5).then(|| s.parse().ok()).flatten();
    Some((prefix, number(index)?, number(count)?))
}

fn shard_path(prefix: &str, index: u32, count: u32) -> PathBuf {
    PathBuf::from(format!("{prefix}-{index:05}-of-{count:05}.gguf"))
}

impl Model {
    /// Opens the model at `path`; any shard of a sharded model stands for all of it.
    ///
    /// # Errors
    /// Whatever is wrong with the file, its shards or its header.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let first = FileSource::open(path)?;
        let Some((prefix, _, count)) = shard_name(path) else {
            return Self::from_sources(vec![Arc::new(first)]);
        };
        let header = Header::read(&first)?;
        if header.u32("split.count")?.unwrap_or(1) <= 1 {
            return Self::from_sources(vec![Arc::new(first)]);
        }
        let mut sources: Vec<Arc<dyn Source>> = Vec::new();
        for index in 1..=count {
            sources.push(Arc::new(FileSource::open(shard_path(prefix, index, count))?));
        }
        Self::from_sources(sources)
    }

    /// Opens a model from its shards, in order.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn from_sources(sources: Vec<Arc<dyn Source>>) -> Result<Self> {
        let mut shards = Vec::new();
        for source in sources {
            let header = Header::read(&*source)?;
            shards.push(Shard { source, header });
        }
        let Some(first) = shards.first() else {
            return Err(Error::Shards { file: "<none>".to_owned(), what: "no file was given".to_owned() });
        };
        let arch = first.header.str("general.architecture")?.unwrap_or_default().to_owned();
        if arch.is_empty() {
            return Err(Error::key(
                first.header.file(),
                "general.architecture",
                "is missing: this is no language model",
            ));
        }
        let by_name = Self::join(&shards)?;
        let digest = Self::hash(&shards)?;
        Ok(Self { shards, by_name, arch, digest })
    }

    /// Checks that the shards belong together and indexes their tensors.
    fn join(shards: &[Shard]) -> Result<HashMap<String, (usize, usize)>> {
        let mut by_name = HashMap::new();
        for (s, shard) in shards.iter().enumerate() {
            let h = &shard.header;
            let bad = |what: String| Error::Shards { file: h.file().to_owned(), what };
            let count = if s == 0 { h.u32("split.count")?.unwrap_or(1).max(1) as usize } else { shards.len() };
            if count != shards.len() {
                return Err(bad(format!(
                    "the model has {count} shards, but {} were found; all must lie beside each other under their \
                     original names (NAME-00001-of-{count:05}.gguf …)",
                    shards.len()
                )));
            }
            if shards.len() > 1 && h.required_u32("split.no")? as usize != s {
                return Err(bad(format!("split.no is not {s}: a shard is missing or was renamed")));
            }
            for (t, info) in h.tensors().iter().enumerate() {
                if by_name.insert(info.name.clone(), (s, t)).is_some() {
                    return Err(Error::tensor(h.file(), &info.name, "is in more than one shard"));
                }
            }
        }
        if let [first, _, ..] = shards
            && let Some(total) = first.header.u32("split.tensors.count")?
            && total as usize != by_name.len()
        {
            let what = format!("{total} tensors are announced, but the shards hold {}", by_name.len());
            return Err(Error::Shards { file: first.header.file().to_owned(), what });
        }
        Ok(by_name)
    }

    /// Headers, lengths and samples of the weights: unlike fine-tunes often have equal headers.
    fn hash(shards: &[Shard]) -> Result<String> {
        const SAMPLES: usize = 64;
        const SAMPLE_BYTES: u64 = 1024;
        let mut hash = blake3::Hasher::new();
        for shard in shards {
            hash.update(&(shard.header.raw().len() as u64).to_le_bytes());
            hash.update(shard.header.raw());
            hash.update(&shard.header.file_len().to_le_bytes());
        }
        let all: Vec<_> = shards.iter().flat_map(|s| s.header.tensors().iter().map(move |t| (s, t))).collect();
        let mut buf = Vec::new();
        for (shard, t) in all.iter().step_by(all.len().div_ceil(SAMPLES).max(1)) {
            buf.resize(t.bytes.min(SAMPLE_BYTES) as usize, 0);
            let at = t.offset + (t.bytes - buf.len() as u64) / 2;
            shard.source.read_at(at, &mut buf).map_err(|e| Error::io(shard.header.file(), "read a tensor", e))?;
            hash.update(&buf);
        }
        Ok(hash.finalize().to_hex().to_string())
    }

    /// File or address of the first shard.
    #[must_use]
    pub fn file(&self) -> &str {
        self.header().file()
    }

    /// Header of the first shard: it has the metadata.
    #[must_use]
    pub fn header(&self) -> &Header {
        #[allow(clippy::indexing_slicing)] // `from_sources` refuses a model without shards
        &self.shards[0].header
    }

    /// Headers of all shards.
    pub fn headers(&self) -> impl Iterator<Item = &Header> {
        self.shards.iter().map(|s| &s.header)
    }

    /// `general.architecture`.
    #[must_use]
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// Identity: hex BLAKE3 over the headers, the lengths and samples of the weights of all shards.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The rules for cutting it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the reason.
    pub fn family(&self) -> Result<&'static Family> {
        families::find(&self.arch).map_err(|reason| Error::Unsupported { arch: self.arch.clone(), reason })
    }

    /// The tensor called `name`.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorRef<'_>> {
        let &(shard, index) = self.by_name.get(name)?;
        Some(TensorRef { shard, info: self.shards.get(shard)?.header.tensors().get(index)? })
    }

    /// All tensors, in the order of the files.
    pub fn tensors(&self) -> impl Iterator<Item = TensorRef<'_>> {
        let shards = self.shards.iter().enumerate();
        shards.flat_map(|(shard, s)| s.header.tensors().iter().map(move |info| TensorRef { shard, info }))
    }

    /// Bytes of all files together.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.header.file_len()).sum()
    }

    /// Fills `buf` with bytes at `offset` of shard `shard`.
    ///
    /// # Errors
    /// [`Error::Io`] when they cannot be read.
    pub fn read_at(&self, shard: usize, offset: u64, buf: &mut [u8]) -> Result<()> {
        let read =
            self.shards.get(shard).map_or(Err(std::io::ErrorKind::NotFound.into()), |s| s.source.read_at(offset, buf));
        read.map_err(|e| {
            Error::io(self.shards.get(shard).map_or("<no such shard>", |s| s.header.file()), "read tensor data", e)
        })
    }

    /// Key of the architecture's own metadata: `llama.block_count`.
    #[must_use]
    pub fn arch_key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }
}

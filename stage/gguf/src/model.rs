//! A model: one GGUF file, or all shards of one.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
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

impl Shard {
    fn new(source: Arc<dyn Source>) -> Result<Self> {
        let header = Header::read(&*source)?;
        Ok(Self { source, header })
    }
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
fn shard_name(name: &str) -> Option<(&str, u32, u32)> {
    let stem = name.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, index) = rest.rsplit_once('-')?;
    let number = |s: &str| (s.len() == 5).then(|| s.parse().ok()).flatten();
    Some((prefix, number(index)?, number(count)?))
}

impl Model {
    /// Opens the model at `path`; any shard of a sharded model stands for all of it.
    ///
    /// # Errors
    /// Whatever is wrong with the file, its shards or its header.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        match path.to_str() {
            Some(name) => Self::open_named(name, &mut |name| Ok(Arc::new(FileSource::open(name)?))),
            None => Self::from_sources(vec![Arc::new(FileSource::open(path)?)]),
        }
    }

    /// Opens the model called `name`, a path or the like that ends in the file's name; any shard of a sharded model stands for
    /// all of it. `open` opens the files by their names.
    ///
    /// # Errors
    /// As [`Model::open`], and those of `open`.
    pub fn open_named(name: &str, open: &mut dyn FnMut(&str) -> Result<Arc<dyn Source>>) -> Result<Self> {
        let mut given = Some(Shard::new(open(name)?)?);
        let sharded = given.as_ref().map_or(Ok(None), |s| s.header.u32("split.count"))?.unwrap_or(1) > 1;
        let Some((prefix, own, count)) = shard_name(name).filter(|_| sharded) else {
            return Self::from_shards(given.into_iter().collect());
        };
        let mut shards = Vec::new();
        for index in 1..=count {
            let known = if index == own { given.take() } else { None };
            let other = || Shard::new(open(&format!("{prefix}-{index:05}-of-{count:05}.gguf"))?);
            shards.push(known.map_or_else(other, Ok)?);
        }
        Self::from_shards(shards)
    }

    /// Opens a model from its shards, in order.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn from_sources(sources: Vec<Arc<dyn Source>>) -> Result<Self> {
        Self::from_shards(sources.into_iter().map(Shard::new).collect::<Result<_>>()?)
    }

    fn from_shards(shards: Vec<Shard>) -> Result<Self> {
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
        let all: Vec<_> =
            shards.iter().enumerate().flat_map(|(i, s)| s.header.tensors().iter().map(move |t| (i, t))).collect();
        let mut samples = vec![Vec::new(); shards.len()];
        for (shard, t) in all.iter().step_by(all.len().div_ceil(SAMPLES).max(1)) {
            let bytes = t.bytes.min(SAMPLE_BYTES);
            if let Some(reads) = samples.get_mut(*shard) {
                reads.push((t.offset + (t.bytes - bytes) / 2, vec![0; bytes as usize]));
            }
        }
        for (shard, reads) in shards.iter().zip(&mut samples) {
            shard.source.read_many(reads).map_err(|e| Error::io(shard.header.file(), "read a tensor", e))?;
            for (_, bytes) in reads {
                hash.update(bytes);
            }
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
        read.map_err(|e| self.read_error(shard, e))
    }

    /// The `len` bytes at `offset` of shard `shard` as a stream, where that is faster than many reads.
    pub(crate) fn stream(&self, shard: usize, offset: u64, len: u64) -> Result<Option<Box<dyn Read + '_>>> {
        let Some(s) = self.shards.get(shard) else { return Ok(None) };
        s.source.stream(offset, len).map_err(|e| self.read_error(shard, e))
    }

    pub(crate) fn read_error(&self, shard: usize, e: std::io::Error) -> Error {
        Error::io(self.shards.get(shard).map_or("<no such shard>", |s| s.header.file()), "read tensor data", e)
    }

    /// What tells these very files from all others; `None` where a source does not say.
    #[must_use]
    pub fn version(&self) -> Option<String> {
        let mut hash = blake3::Hasher::new();
        for shard in &self.shards {
            let version = shard.source.version()?;
            hash.update(&(version.len() as u64).to_le_bytes());
            hash.update(version.as_bytes());
        }
        Some(hash.finalize().to_hex().to_string())
    }

    /// Key of the architecture's own metadata: `llama.block_count`.
    #[must_use]
    pub fn arch_key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }
}

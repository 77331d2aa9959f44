//! Compiles `cuda/*/*.cu` to one fatbin each and checks that every symbol of `ids.rs` is in its image.
//!
//! The same inputs give the same bytes: no GPU is looked for. `TE_FAST_CUDA_ARCHS` names the architectures,
//! `TE_FAST_NVCC` the compiler, `TE_FAST_LINEINFO=1` adds line numbers for profilers, `TE_FAST_SKIP_CUDA=1` builds
//! without images. `TE_FAST_FATBINS` is a folder for finished images: builds for several Pythons and machines, each
//! with its own `OUT_DIR`, then run nvcc once.
#![allow(missing_docs, clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

#[path = "src/constants.rs"]
#[allow(dead_code, unreachable_pub)]
mod constants;
#[path = "src/ids.rs"]
#[allow(dead_code, unreachable_pub)]
mod ids;

use constants::NAMESPACES;
use ids::{Image, KernelId};

/// Machine code of a release; the last one is also shipped as PTX for GPUs to come.
const RELEASE_ARCHS: &str = "80,89,90,100,120";
/// The architecture of `Image::is_hopper_only`.
const HOPPER: &str = "90";
/// Shipped as PTX, too: GPUs between the listed ones (11.0, Thor) cannot run the last one's.
const PTX_ARCH: &str = "90";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/constants.rs");
    println!("cargo::rerun-if-changed=src/ids.rs");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    write_constants(&out.join("include/common"));
    if variable("TE_FAST_SKIP_CUDA").is_some_and(|value| value == "1") {
        let empty = vec!["&[]".to_string(); Image::ALL.len()];
        return write_table(&out, &empty, &[]);
    }

    let sources = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"))
        .join("../../cuda")
        .canonicalize()
        .expect("cuda/ exists");
    for entry in fs::read_dir(&sources).expect("cuda/ is readable") {
        let path = entry.expect("a readable entry").path();
        // Cargo watches all files of a folder, and the other files here are documentation.
        if path.is_dir() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    let nvcc = find_nvcc();
    let list = variable("TE_FAST_CUDA_ARCHS").unwrap_or_else(|| RELEASE_ARCHS.into());
    let archs: Vec<&str> = list.split([',', ';', ' ']).filter(|arch| !arch.is_empty()).collect();
    assert!(!archs.is_empty(), "TE_FAST_CUDA_ARCHS is empty; give e.g. 90 or 80,90");
    let options = nvcc_options(&archs);
    let hopper_options = archs.contains(&HOPPER).then(hopper_options);
    let all_options = [options.as_slice(), hopper_options.as_deref().unwrap_or_default()].concat();
    let kept = variable("TE_FAST_FATBINS")
        .map(|folder| (PathBuf::from(folder), key_of(&nvcc, &all_options, [&sources, &out.join("include")])));

    let build = Build { nvcc: &nvcc, sources: &sources, out: &out, kept };
    build.all(|image| match &hopper_options {
        _ if !image.is_hopper_only() => Some((&options, archs.len())),
        Some(hopper) => Some((hopper, 1)),
        None => None,
    });
    let include = |image: &Image| {
        if image.is_hopper_only() && hopper_options.is_none() {
            return "&[]".to_string();
        }
        format!("include_bytes!(r\"{}\")", fatbin(&out, *image).display())
    };
    let includes: Vec<String> = Image::ALL.iter().map(include).collect();
    let numbers: Vec<u32> = archs
        .iter()
        .map(|arch| arch.trim_end_matches(['a', 'f']).parse().expect("an architecture is a number, e.g. 90"))
        .collect();
    write_table(&out, &includes, &numbers);
}

/// The inputs and the output folder of images.
struct Build<'a> {
    nvcc: &'a Path,
    sources: &'a Path,
    out: &'a Path,
    /// A folder of finished images, and a number of their inputs.
    kept: Option<(PathBuf, u64)>,
}

impl Build<'_> {
    /// Makes every image that has architectures.
    fn all<'o>(&self, options_of: impl Fn(Image) -> Option<(&'o Vec<String>, usize)> + Sync) {
        let jobs = std::thread::available_parallelism().map_or(2, usize::from);
        let next = AtomicUsize::new(0);
        // The longest compilations are last in the list. They start first, so that short ones fill the end.
        let images: Vec<Image> = Image::ALL.iter().rev().copied().collect();
        std::thread::scope(|scope| {
            for _ in 0..jobs {
                scope.spawn(|| {
                    while let Some(&image) = images.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Some((options, machines)) = options_of(image) {
                            self.one(image, options, machines);
                        }
                    }
                });
            }
        });
    }

    fn one(&self, image: Image, options: &[String], machines: usize) {
        let stored = self
            .kept
            .as_ref()
            .map(|(folder, key)| folder.join(image.path()).with_extension(format!("{key:016x}.fatbin")));
        if let Some(stored) = stored.as_ref().filter(|stored| stored.is_file()) {
            return take(stored, &fatbin(self.out, image));
        }
        compile(self.nvcc, options, machines, self.sources, self.out, image);
        if let Some(stored) = stored {
            take(&fatbin(self.out, image), &stored);
        }
    }
}

/// An environment variable. Cargo is told of it only when it is read, so that an unused variable causes no rebuild.
fn variable(name: &str) -> Option<String> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).ok()
}

/// A number of everything that the images depend on: the compiler, its options and all device code, without their
/// paths.
fn key_of(nvcc: &Path, options: &[String], folders: [&Path; 2]) -> u64 {
    let mut hasher = DefaultHasher::new();
    options.hash(&mut hasher);
    let version = Command::new(nvcc).arg("--version").output();
    version.unwrap_or_else(|error| panic!("cannot run {}: {error}", nvcc.display())).stdout.hash(&mut hasher);
    for folder in folders {
        let mut files = Vec::new();
        list_files(folder, &mut files);
        files.sort();
        for file in files {
            file.strip_prefix(folder).expect("a file of the folder").hash(&mut hasher);
            fs::read(&file).expect("a readable file").hash(&mut hasher);
        }
    }
    hasher.finish()
}

fn list_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            list_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh") {
            files.push(path);
        }
    }
}

/// Copy a file atomically, so that no reader finds a partial file.
fn take(from: &Path, to: &Path) {
    let folder = to.parent().expect("a file in a folder");
    fs::create_dir_all(folder).expect("TE_FAST_FATBINS and OUT_DIR are writable");
    let partial = to.with_extension(format!("{}.part", std::process::id()));
    fs::copy(from, &partial).expect("the image can be copied");
    fs::rename(&partial, to).expect("the copy can be renamed");
}

/// `constants.cuh`, in a folder for headers that is searched beside `cuda/`.
fn write_constants(folder: &Path) {
    let mut text = String::from("// Made by rust/kernels/build.rs of rust/kernels/src/constants.rs.\n#pragma once\n");
    for (namespace, values) in NAMESPACES {
        let inner = if *namespace == "common" { String::new() } else { format!("::{namespace}") };
        writeln!(text, "\nnamespace te_fast{inner} {{").unwrap();
        for (name, value) in *values {
            let camel: String = name.split('_').map(|word| word[..1].to_owned() + &word[1..].to_lowercase()).collect();
            let (of, suffix) = if i32::try_from(*value).is_ok() { ("int", "") } else { ("unsigned", "u") };
            writeln!(text, "constexpr {of} k{camel} = {value}{suffix};").unwrap();
        }
        writeln!(text, "}}  // namespace te_fast{inner}").unwrap();
    }
    fs::create_dir_all(folder).expect("OUT_DIR is writable");
    fs::write(folder.join("constants.cuh"), text).expect("OUT_DIR is writable");
}

fn fatbin(out: &Path, image: Image) -> PathBuf {
    out.join(image.path()).with_extension("fatbin")
}

fn write_table(out: &Path, images: &[String], archs: &[u32]) {
    let mut text = String::new();
    writeln!(text, "static IMAGE_BYTES: [&[u8]; {}] = [{}];", images.len(), images.join(", ")).unwrap();
    writeln!(text, "static ARCHITECTURES: &[u32] = &{archs:?};").unwrap();
    fs::write(out.join("images.rs"), text).expect("OUT_DIR is writable");
}

/// `TE_FAST_NVCC`, then `CUDA_HOME`, then the active Python's `nvidia/cu*/bin/nvcc`, then `PATH`.
fn find_nvcc() -> PathBuf {
    if let Some(path) = variable("TE_FAST_NVCC") {
        return PathBuf::from(path);
    }
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = variable(name) {
            let nvcc = Path::new(&home).join("bin/nvcc");
            if nvcc.is_file() {
                return nvcc;
            }
        }
    }
    let script = "import glob, os, sys\nfor p in sys.path:\n    for f in sorted(glob.glob(os.path.join(p, 'nvidia', 'cu*', 'bin', 'nvcc'))):\n        print(f); sys.exit(0)";
    let mut pythons: Vec<PathBuf> =
        ["PYO3_PYTHON", "PYTHON_SYS_EXECUTABLE"].into_iter().filter_map(variable).map(PathBuf::from).collect();
    if let Some(venv) = variable("VIRTUAL_ENV") {
        pythons.push(Path::new(&venv).join("bin/python"));
    }
    pythons.push("python3".into());
    for python in pythons {
        if let Ok(output) = Command::new(&python).args(["-c", script]).output() {
            let found = String::from_utf8_lossy(&output.stdout).trim().to_string();
            if !found.is_empty() {
                return found.into();
            }
        }
    }
    if Command::new("nvcc").arg("--version").output().is_ok_and(|output| output.status.success()) {
        return "nvcc".into();
    }
    panic!(
        "no nvcc found. Either install it from PyPI into the active environment:\n  pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'\nor set TE_FAST_NVCC to one. TE_FAST_SKIP_CUDA=1 builds for the CPU alone."
    );
}

fn compile(nvcc: &Path, options: &[String], archs: usize, sources: &Path, out: &Path, image: Image) {
    let kept = out.join(image.path());
    // Files of an earlier list of architectures must not be searched.
    drop(fs::remove_dir_all(&kept));
    fs::create_dir_all(&kept).expect("OUT_DIR is writable");
    run_nvcc(nvcc, options, [sources, &out.join("include")], image, &fatbin(out, image), &kept);
    // The shipped image is compressed; its parts, which nvcc keeps, show their symbols.
    let parts = fs::read_dir(&kept).expect("nvcc keeps its parts").map(|entry| entry.expect("a readable entry").path());
    let cubins: Vec<PathBuf> =
        parts.filter(|path| path.extension().is_some_and(|extension| extension == "cubin")).collect();
    assert_eq!(cubins.len(), archs, "nvcc left {cubins:?} for {archs} architectures");
    for cubin in &cubins {
        let bytes = fs::read(cubin).expect("nvcc wrote the cubin");
        for id in KernelId::all().filter(|id| id.image() == image) {
            let needle = [b"\0", id.symbol().as_bytes(), b"\0"].concat();
            assert!(
                bytes.windows(needle.len()).any(|window| window == needle),
                "{} has no kernel {}, which ids.rs names",
                cubin.display(),
                id.symbol()
            );
        }
    }
    fs::remove_dir_all(&kept).expect("the parts were just written");
}

/// Options of images for one architecture: no PTX can stand in for them. Spills are allowed: the walk over the groups
/// of a product keeps a few words per tile in memory, outside of its loops.
fn hopper_options() -> Vec<String> {
    let mut options = common_options();
    options.extend(["-gencode=arch=compute_90a,code=sm_90a".into(), "--compress-mode=size".into()]);
    options
}

/// Options of every image.
fn common_options() -> Vec<String> {
    let mut options: Vec<String> = "-fatbin -std=c++20 -O3 -Werror=all-warnings".split(' ').map(String::from).collect();
    // Two thirds of an image, which only profilers and the sanitizer read.
    if variable("TE_FAST_LINEINFO").is_some_and(|value| value == "1") {
        options.push("-lineinfo".into());
    }
    options
}

/// All of nvcc's options that have no paths in them.
fn nvcc_options(archs: &[&str]) -> Vec<String> {
    let mut options = common_options();
    // Two architectures at a time, so that no core waits for the last images.
    options.push("--threads=2".into());
    // Code that is not optimised spills.
    options.push(match variable("TE_FAST_OFAST_COMPILE") {
        Some(level) => format!("--Ofast-compile={level}"),
        None => "-Xptxas=-warn-spills".into(),
    });
    options.extend(archs.iter().map(|arch| format!("-gencode=arch=compute_{arch},code=sm_{arch}")));
    let last = archs.len() - 1;
    let ptx = archs.iter().enumerate().filter(|(index, arch)| *index == last || **arch == PTX_ARCH);
    options.extend(ptx.map(|(_, arch)| format!("-gencode=arch=compute_{arch},code=compute_{arch}")));
    options.push("--compress-mode=size".into());
    options
}

fn run_nvcc(nvcc: &Path, options: &[String], folders: [&Path; 2], image: Image, output: &Path, kept: &Path) {
    let source = folders[0].join(image.path()).with_extension("cu");
    let mut command = Command::new(nvcc);
    command.args(options);
    for folder in folders {
        command.arg("-I").arg(folder);
    }
    command.args(["--keep", "--keep-dir"]).arg(kept).arg("-o").arg(output).arg(&source);
    let result = command.output().unwrap_or_else(|error| panic!("cannot run {}: {error}", nvcc.display()));
    assert!(
        result.status.success(),
        "nvcc failed on {}:\n{}",
        source.display(),
        String::from_utf8_lossy(&result.stderr)
    );
}

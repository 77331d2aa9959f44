//! Calls of the CUDA driver, with a stub instead of the driver (`driver_stub.c`): each test runs itself again in a
//! process that finds the stub as `libcuda.so.1`. The tests need a C compiler and pass without one.
#![expect(clippy::unwrap_used, reason = "a test stops at the first error")]

use std::path::PathBuf;
use std::process::{Command, Output};

use te_fast_core::base::config::Config;
use te_fast_core::base::dtype::Device;
use te_fast_core::cuda::device::Stream;
use te_fast_core::cuda::graph::{Graph, GraphReaders};
use te_fast_core::cuda::memory::take_retired;
use te_fast_core::launch::target::Backend;
use te_fast_core::quant::graph_memory::GraphMemory;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::{Memory, Place};

const CHILD: &str = "TE_FAST_TEST_STUB_DRIVER";
const PLACE: Place = Place { device: Device::Cuda(0), stream: Stream::DEFAULT };

/// Whether this is the process with the stub.
fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// The folder with the stub; none without a compiler.
fn stub(test: &str) -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&folder).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/driver_stub.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(folder.join("libcuda.so.1")).arg(source);
    let built = compiler.output().ok()?;
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    Some(folder)
}

/// Runs `test` in a process with the stub and returns its output.
fn with_stub(test: &str, variable: Option<&str>) -> Option<String> {
    let folder = stub(test)?;
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env("LD_LIBRARY_PATH", folder).env(CHILD, "1");
    if let Some(variable) = variable {
        child.env(variable, "1");
    }
    let Output { status, stdout, stderr } = child.output().unwrap();
    let printed = String::from_utf8_lossy(&stdout).into_owned();
    assert!(status.success(), "{printed}{}", String::from_utf8_lossy(&stderr));
    Some(printed)
}

fn dispatcher() -> Dispatcher {
    let mut dispatcher = Dispatcher::new(Config {
        synchronise: false,
        check_device: true,
        exchange_table: true,
        graphs: true,
        weights_together: true,
    });
    let _ = dispatcher.make_current(Device::Cuda(0)).unwrap();
    dispatcher
}

#[test]
fn memory_goes_back_from_a_thread_without_a_context() {
    if is_child() {
        let mut dispatcher = dispatcher();
        for scratch in [1 << 10, 8 << 20] {
            dispatcher.lane(PLACE, scratch, Memory::Own).unwrap();
        }
        let memory = dispatcher.take_memory();
        std::thread::spawn(move || {
            drop(take_retired());
            drop(memory);
        })
        .join()
        .unwrap();
        assert_eq!(dispatcher.inventory().iter().map(|device| device.3).sum::<usize>(), 0);
        return;
    }
    let Some(printed) = with_stub("memory_goes_back_from_a_thread_without_a_context", None) else { return };
    // Workspace, scratch, and the smaller scratch that it replaced.
    assert_eq!(printed.matches("allocated in its context").count(), 3, "{printed}");
    assert_eq!(printed.matches("freed in its context").count(), 3, "{printed}");
    assert!(!printed.contains("without a context"), "{printed}");
}

#[test]
fn graphs_are_destroyed_in_their_context() {
    if is_child() {
        let mut dispatcher = dispatcher();
        let mut target = dispatcher.target(PLACE).unwrap();
        let Backend::Cuda(queue) = &mut target.backend else { unreachable!() };
        let graph = Graph::capture(queue, |_| Ok(())).unwrap();
        std::thread::spawn(move || drop(graph)).join().unwrap();
        return;
    }
    let Some(printed) = with_stub("graphs_are_destroyed_in_their_context", None) else { return };
    assert!(printed.contains("destroyed in its context"), "{printed}");
}

#[test]
fn what_a_graph_reads_is_let_go_of_with_it() {
    if is_child() {
        let mut dispatcher = dispatcher();
        let mut target = dispatcher.target(PLACE).unwrap();
        let Backend::Cuda(queue) = &mut target.backend else { unreachable!() };
        let mut memory = GraphMemory::default();
        memory.keep("spare", None).unwrap();
        let graph = Graph::capture(queue, |queue| memory.keep("read", Some(queue.stream))).unwrap();
        assert_eq!(memory.release(0), ["spare"]);
        assert!(memory.release(0).is_empty());
        drop(graph);
        assert_eq!(memory.release(0), ["read"]);
        return;
    }
    with_stub("what_a_graph_reads_is_let_go_of_with_it", None);
}

#[test]
fn what_a_graph_does_not_take_is_not_kept_for_it() {
    if is_child() {
        let mut dispatcher = dispatcher();
        let mut target = dispatcher.target(PLACE).unwrap();
        let Backend::Cuda(queue) = &mut target.backend else { unreachable!() };
        let readers = GraphReaders::default();
        let error = Graph::capture(queue, |queue| readers.add(queue.stream)).unwrap_err().to_string();
        assert!(error.starts_with("cuGraphRetainUserObject failed with 54321"), "{error}");
        assert!(!readers.exist());
        return;
    }
    with_stub("what_a_graph_does_not_take_is_not_kept_for_it", Some("STUB_RETAIN_FAILS"));
}

#[test]
fn statuses_that_no_header_has_are_numbers() {
    if is_child() {
        let mut dispatcher = dispatcher();
        let error = dispatcher.lane(PLACE, 1 << 10, Memory::Own).unwrap_err().to_string();
        assert!(error.starts_with("cuMemAlloc failed with 54321: unknown error"), "{error}");
        return;
    }
    with_stub("statuses_that_no_header_has_are_numbers", Some("STUB_ALLOC_FAILS"));
}

//! What is granted of a device whose reports are scripted.

use sd_backend::fake::{FakeDevice, FakeOptions, GraphFailure, MemoryStory};
use sd_backend::{
    Backend, BackendOptions, Buffer, Error, Ledger, MemoryBudget, MemoryBudgets, MemoryKind,
};

const MIB: u64 = 1 << 20;

fn fake(backend: &str) -> FakeDevice {
    FakeDevice::new(FakeOptions {
        backend: backend.to_owned(),
        memory: 1 << 30,
        ..FakeOptions::default()
    })
}

fn available(fake: FakeDevice, ledger: &Ledger) -> Option<u64> {
    ledger.report(fake.device()).available
}

#[test]
fn reports_are_believed_as_far_as_they_can_be() {
    for (backend, story, left) in [
        // Head-room is left whatever was granted.
        ("Fake", MemoryStory::True, Some(512 * MIB)),
        (
            "Fake",
            MemoryStory::Of(700 * MIB, 1024 * MIB),
            Some(188 * MIB),
        ),
        ("Fake", MemoryStory::Of(100 * MIB, 1024 * MIB), Some(0)),
        // Nothing is said.
        ("Fake", MemoryStory::Of(0, 0), None),
        // More free than there is: an underflow on Vulkan, limited to what there can be elsewhere.
        ("Vulkan", MemoryStory::Of(u64::MAX - 5, 1024 * MIB), Some(0)),
        (
            "Fake",
            MemoryStory::Of(2048 * MIB, 1024 * MIB),
            Some(512 * MIB),
        ),
    ] {
        let fake = fake(backend);
        fake.tell(story);
        assert_eq!(
            available(fake, &Ledger::default()),
            left,
            "{backend} {story:?}"
        );
        let granted = Ledger::new(MemoryBudgets::every(MemoryBudget::Bytes(100 * MIB)));
        let expected = left.map_or(100 * MIB, |left| left.min(100 * MIB));
        assert_eq!(
            available(fake, &granted),
            Some(expected),
            "{backend} {story:?}"
        );
    }
}

#[test]
fn free_memory_is_read_anew_and_less_what_is_held() {
    let (fake, ledger) = (fake("Fake"), Ledger::default());
    let reserve = |bytes| ledger.reserve(fake.device(), bytes, MemoryKind::Cache);
    // A device that does not notice what it gave away.
    fake.tell(MemoryStory::Of(1024 * MIB, 1024 * MIB));
    let held = reserve(300 * MIB).unwrap();
    assert_eq!(available(fake, &ledger), Some(212 * MIB));
    assert!(matches!(reserve(213 * MIB), Err(Error::OutOfMemory { .. })));
    // Somebody else takes memory, and gives it back.
    fake.tell(MemoryStory::Of(600 * MIB, 1024 * MIB));
    assert_eq!(available(fake, &ledger), Some(88 * MIB));
    fake.tell(MemoryStory::Of(1024 * MIB, 1024 * MIB));
    drop(held);
    assert_eq!(available(fake, &ledger), Some(512 * MIB));
}

#[test]
fn a_refusal_tells_all_figures() {
    let fake = fake("Fake");
    let ledger = Ledger::with_headroom(MemoryBudgets::every(MemoryBudget::Bytes(64 * MIB)), 0);
    let _weights = ledger
        .reserve(fake.device(), 60 * MIB, MemoryKind::Weights)
        .unwrap();
    let error = Buffer::allocate(&ledger, fake.device(), 5 << 20, MemoryKind::Compute).unwrap_err();
    assert_eq!(
        error.to_string(),
        "out of memory on Fake0: 5.00 MiB needed, 964.00 MiB free of 1.00 GiB; of the budget of 64.00 MiB 60.00 MiB \
         are used (weights 60.00 MiB)"
    );
    // The driver refuses what was granted.
    fake.fail_allocation(1);
    let error = Buffer::allocate(&ledger, fake.device(), 1 << 20, MemoryKind::Compute).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { requested, .. } if requested == MIB));
    assert_eq!(ledger.report(fake.device()).used.total(), 60 * MIB);
    assert!(Buffer::allocate(&ledger, fake.device(), 1 << 20, MemoryKind::Compute).is_ok());
}

#[test]
fn failures_of_graphs_have_their_kind() {
    let fake = fake("Fake");
    let mut backend = Backend::new(fake.device(), &BackendOptions::default()).unwrap();
    // SAFETY: a graph of one operation in a context that has room for it and its numbers, and lives to the end of the
    // block.
    unsafe {
        let context = sd_ggml_sys::ggml_init(sd_ggml_sys::ggml_init_params {
            mem_size: sd_ggml_sys::ggml_graph_overhead() + (1 << 16),
            mem_buffer: std::ptr::null_mut(),
            no_alloc: false,
        });
        let graph = sd_ggml_sys::ggml_new_graph(context);
        let numbers = sd_ggml_sys::ggml_new_tensor_1d(context, sd_ggml_sys::GGML_TYPE_F32, 4);
        sd_ggml_sys::ggml_set_zero(numbers);
        sd_ggml_sys::ggml_build_forward_expand(graph, sd_ggml_sys::ggml_neg(context, numbers));
        fake.fail_graph(1, GraphFailure::Allocation);
        let error = backend.compute(graph, None).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        fake.fail_graph(2, GraphFailure::Other);
        backend.compute(graph, None).unwrap();
        let error = backend.compute(graph, None).unwrap_err();
        assert!(matches!(error, Error::Compute { .. }), "{error}");
        backend.compute(graph, None).unwrap();
        sd_ggml_sys::ggml_free(context);
    }
    assert_eq!(fake.counts().graphs, 4);
}

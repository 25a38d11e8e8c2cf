//! Sizes, offsets and numbers in the bindings are those the C compiler finds in the headers.
//!
//! A C program that prints them is generated, compiled with the compiler that built ggml and run: no libclang needed, so
//! every build can check that the committed bindings describe the ggml it has just compiled.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::mem::{align_of, offset_of, size_of};
use std::path::PathBuf;
use std::process::Command;

use sd_ggml_sys as sys;

/// Folders of the headers this build used.
fn header_folders() -> Vec<PathBuf> {
    env::split_paths(env!("SD_GGML_HEADERS")).collect()
}

/// What the bindings say: an expression for the C compiler, and the value it should have.
#[derive(Default)]
struct Expected {
    values: Vec<(String, i128)>,
}

impl Expected {
    fn value(&mut self, expression: impl Into<String>, value: i128) {
        self.values.push((expression.into(), value));
    }

    fn bytes(&mut self, expression: String, value: usize) {
        self.value(expression, value as i128);
    }
}

/// Every field of every struct named. The pattern has no `..`: a field that an upgrade adds does not compile here.
macro_rules! structs {
    ($expected:ident: $($name:ident { $($field:ident),* $(,)? })*) => {$(
        $expected.bytes(concat!("sizeof(struct ", stringify!($name), ")").to_owned(), size_of::<sys::$name>());
        $expected.bytes(concat!("_Alignof(struct ", stringify!($name), ")").to_owned(), align_of::<sys::$name>());
        $(
            // bindgen appends `_` to names that are words of Rust.
            let field = stringify!($field).trim_end_matches('_');
            let expression = format!("offsetof(struct {}, {field})", stringify!($name));
            $expected.bytes(expression, offset_of!(sys::$name, $field));
        )*
        let _ = |sys::$name { $($field: _),* }: sys::$name| {};
    )*};
}

macro_rules! enums {
    ($expected:ident: $($name:ident),* $(,)?) => {$(
        $expected.bytes(concat!("sizeof(enum ", stringify!($name), ")").to_owned(), size_of::<sys::$name>());
    )*};
}

macro_rules! numbers {
    ($expected:ident: $($name:ident),* $(,)?) => {$(
        $expected.value(stringify!($name), i128::from(sys::$name));
    )*};
}

fn public_headers() -> Expected {
    let mut expected = Expected::default();
    structs! { expected:
        ggml_init_params { mem_size, mem_buffer, no_alloc }
        ggml_tensor {
            type_, buffer, ne, nb, op, op_params, flags, src, view_src, view_offs, data, name, extra, padding,
        }
        ggml_type_traits {
            type_name, blck_size, blck_size_interleave, type_size, is_quantized, to_float, from_float_ref,
        }
        ggml_threadpool_params { cpumask, n_threads, prio, poll, strict_cpu, paused }
        ggml_tallocr { buffer, base, alignment, offset }
        ggml_backend_dev_caps { async_, host_buffer, buffer_from_host_ptr, events, mmap_support }
        ggml_backend_dev_props { name, description, memory_free, memory_total, type_, device_id, caps }
        ggml_backend_feature { name, value }
        ggml_backend_meta_split_state { axis, ne, nr, n_segments }
        ggml_backend_graph_copy { buffer, ctx_allocated, ctx_unallocated, graph }
        ggml_cplan { work_size, work_data, n_threads, threadpool, abort_callback, abort_callback_data, use_ref }
        ggml_type_traits_cpu { from_float, vec_dot, vec_dot_type, nrows }
        gguf_init_params { no_alloc, ctx }
    }
    enums! { expected:
        ggml_backend_buffer_usage, ggml_backend_dev_type, ggml_log_level, ggml_op, ggml_op_pool, ggml_prec,
        ggml_scale_mode, ggml_sort_order, ggml_status, ggml_type, ggml_unary_op, gguf_type,
    }
    numbers! { expected:
        GGML_MAX_DIMS, GGML_MAX_NAME, GGML_MAX_OP_PARAMS, GGML_MAX_SRC, GGML_DEFAULT_GRAPH_SIZE, GGML_MEM_ALIGN,
        GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_I32, GGML_TYPE_COUNT,
        GGML_OP_MUL_MAT, GGML_OP_FLASH_ATTN_EXT, GGML_OP_COUNT, GGML_UNARY_OP_COUNT,
        GGML_STATUS_ALLOC_FAILED, GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, GGML_STATUS_ABORTED,
        GGML_BACKEND_DEVICE_TYPE_CPU, GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_BUFFER_USAGE_WEIGHTS,
        GGML_TENSOR_FLAG_INPUT, GGML_TENSOR_FLAG_OUTPUT, GGUF_TYPE_COUNT,
    }
    expected
}

/// What a backend implements; the header is not among those that ggml installs.
fn backend_interface() -> Expected {
    let mut expected = Expected::default();
    structs! { expected:
        ggml_backend_buffer_type_i {
            get_name, alloc_buffer, alloc_buffer_n, get_alignment, get_max_size, get_alloc_size, get_alloc_size_n,
            is_host,
        }
        ggml_backend_buffer_type { iface, device, context }
        ggml_backend_buffer_i {
            free_buffer, get_base, init_tensor, memset_tensor, set_tensor, get_tensor, set_tensor_2d, get_tensor_2d,
            cpy_tensor, clear, reset,
        }
        ggml_backend_buffer { iface, buft, context, size, usage }
        ggml_backend_graph_optimize_params { add_alloc_dep, user_data }
        ggml_backend_i {
            get_name, free, set_tensor_async, get_tensor_async, set_tensor_2d_async, get_tensor_2d_async,
            cpy_tensor_async, synchronize, graph_plan_create, graph_plan_free, graph_plan_update, graph_plan_compute,
            graph_compute, event_record, event_wait, graph_optimize,
        }
        ggml_backend { guid, iface, device, context }
        ggml_backend_event { device, context }
        ggml_backend_device_i {
            get_name, get_description, get_memory, get_type, get_props, init_backend, get_buffer_type,
            get_host_buffer_type, buffer_from_host_ptr, supports_op, supports_buft, offload_op, event_new, event_free,
            event_synchronize,
        }
        ggml_backend_device { iface, reg, context }
        ggml_backend_reg_i { get_name, get_device_count, get_device, get_proc_address }
        ggml_backend_reg { api_version, iface, context }
    }
    numbers! { expected: GGML_BACKEND_API_VERSION }
    expected
}

/// Lets the C compiler evaluate every expression with `headers` included.
fn evaluate(name: &str, headers: &[&str], expected: &Expected) -> BTreeMap<String, i128> {
    let mut program = String::from("#include <stddef.h>\n#include <stdio.h>\n");
    for header in headers {
        writeln!(program, "#include \"{header}\"").unwrap();
    }
    program.push_str("int main(void) {\n");
    for (expression, _) in &expected.values {
        writeln!(
            program,
            "    printf(\"%lld %s\\n\", (long long) ({expression}), \"{expression}\");"
        )
        .unwrap();
    }
    program.push_str("    return 0;\n}\n");

    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).unwrap();
    let source = folder.join("layout.c");
    let binary = folder.join(format!("layout{}", env::consts::EXE_SUFFIX));
    fs::write(&source, program).unwrap();

    let mut command = Command::new(env!("SD_GGML_CC"));
    command.current_dir(&folder).arg(&source);
    for headers in header_folders() {
        command.arg("-I").arg(headers);
    }
    if cfg!(target_env = "msvc") {
        command
            .arg("/std:c11")
            .arg(format!("/Fe:{}", binary.display()));
    } else {
        command.arg("-std=c11").arg("-o").arg(&binary);
    }
    let compiled = command.output().unwrap();
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    let printed = Command::new(&binary).output().unwrap().stdout;
    let lines = String::from_utf8(printed).unwrap();
    lines
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(value, expression)| (expression.to_owned(), value.parse().unwrap()))
        .collect()
}

fn assert_same(name: &str, headers: &[&str], expected: &Expected) {
    let found = evaluate(name, headers, expected);
    let wrong: Vec<String> = expected
        .values
        .iter()
        .filter(|(expression, value)| found.get(expression) != Some(value))
        .map(|(expression, value)| {
            format!(
                "{expression}: C {:?}, bindings {value}",
                found.get(expression)
            )
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn public_headers_are_as_bound() {
    let headers = [
        "ggml.h",
        "ggml-alloc.h",
        "ggml-backend.h",
        "ggml-cpu.h",
        "gguf.h",
    ];
    assert_same("public", &headers, &public_headers());
}

#[test]
fn backend_interface_is_as_bound() {
    let header = "ggml-backend-impl.h";
    if header_folders()
        .iter()
        .any(|folder| folder.join(header).is_file())
    {
        assert_same("interface", &[header], &backend_interface());
    }
}

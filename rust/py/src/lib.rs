//! `te_fast._native`: the dispatcher for Python. Functions here extract arguments, call the core and convert results;
//! the logic is in `te_fast_core`.

mod attention;
mod autocast;
mod direct;
mod error;
mod graphs;
mod hooks;
mod layer;
mod program;
mod tensor;
mod torch;

use pyo3::prelude::*;

/// The native half of te_fast. All threads share one dispatcher, and the GIL is its lock, so a free-threaded
/// interpreter must enable the GIL.
#[pymodule(gil_used = true)]
mod _native {
    #[pymodule_export]
    use crate::attention::call::RepeatedCall;
    #[pymodule_export]
    use crate::attention::observed::{
        ObservedLaunches, RepeatedLaunches, learns_launches, new_stream, observe_launches, repeat_launches,
    };
    #[pymodule_export]
    use crate::attention::repeated::RepeatedAttention;
    #[pymodule_export]
    use crate::autocast::recipe::NativeRecipe;
    #[pymodule_export]
    use crate::autocast::recompute::{
        HeldRegion, autocast_enter_phase, autocast_held, autocast_leave_phase, autocast_phase_thread,
        autocast_set_first, autocast_take_first,
    };
    #[pymodule_export]
    use crate::autocast::region::{
        AutocastRegion, CurrentRegion, autocast_callbacks, autocast_is_of_factory, autocast_objects, autocast_region,
        autocast_reset, autocast_set, autocast_set_depth,
    };
    #[pymodule_export]
    use crate::autocast::slots::{
        SlotsHandle, amax_mark_all_ran, amax_participants, delayed_callbacks, note_scale_change, set_graph_phase,
        update_scales,
    };
    #[pymodule_export]
    use crate::direct::activation::{activation, activation_backward};
    #[pymodule_export]
    use crate::direct::activation_groups::activation_groups;
    #[pymodule_export]
    use crate::direct::cross_entropy::{cross_entropy_backward, cross_entropy_forward, cross_entropy_part};
    #[pymodule_export]
    use crate::direct::dispatcher::{
        counters, cuda_driver_version, device_facts, inventory, load_kernels, record, recorded, release_memory,
        reset_counters, rows_to_pad, set_auto_pad, set_check_device, stage_clock, stage_nanoseconds,
    };
    #[pymodule_export]
    use crate::direct::gemm::gemm;
    #[pymodule_export]
    use crate::direct::grouped_gemm::{cublas_multiplies_groups, grouped_gemm};
    #[pymodule_export]
    use crate::direct::norm::norm;
    #[pymodule_export]
    use crate::direct::norm_backward::norm_backward;
    #[pymodule_export]
    use crate::direct::permute::{moe_apply, moe_dropped, moe_map, moe_permute, moe_unpermute, moe_unpermute_backward};
    #[pymodule_export]
    use crate::direct::permute_cast::{moe_pad, moe_pad_list, moe_padded_splits, moe_permute_cast};
    #[pymodule_export]
    use crate::direct::quantize::{dequantize, quantize};
    #[pymodule_export]
    use crate::direct::quantize_groups::quantize_groups;
    #[pymodule_export]
    use crate::direct::rope::{join_rotated, rotate, split_rotated};
    #[pymodule_export]
    use crate::direct::router::{router_backward, router_forward};
    #[pymodule_export]
    use crate::graphs::backward::{traced_backward, traced_on_nothing};
    #[pymodule_export]
    use crate::graphs::call::{TracedCall, traced_call};
    #[pymodule_export]
    use crate::graphs::entry::{traced_backward_call, traced_forward_call};
    #[pymodule_export]
    use crate::graphs::forward::traced_forward;
    #[pymodule_export]
    use crate::graphs::registry::{traced_columns, traced_describe, traced_install, traced_register};
    #[pymodule_export]
    use crate::graphs::slots::traced_update_scales;
    #[pymodule_export]
    use crate::hooks::install_hooks;
    #[pymodule_export]
    use crate::layer::call::{
        grouped_layer_call, grouped_layer_forward, grouped_layer_straight, layer_call, layer_forward,
    };
    #[pymodule_export]
    use crate::layer::module::{are_as_found, are_called_plainly};
    #[pymodule_export]
    use crate::layer::snapshot::Snapshot;
    #[pymodule_export]
    use crate::program::backward::{ProgramSaved, program_backward};
    #[pymodule_export]
    use crate::program::buffers::Buffers;
    #[pymodule_export]
    use crate::program::cut::{CutCall, CutSaved, cut_apply, cut_autograd_forward, cut_backward};
    #[pymodule_export]
    use crate::program::deferred::{program_backward_dw, weight_gradient};
    #[pymodule_export]
    use crate::program::entry::{program_apply, program_autograd_forward, program_run_backward, program_run_forward};
    #[pymodule_export]
    use crate::program::handle::ProgramHandle;
    #[pymodule_export]
    use crate::program::module_call::program_module_call;
    #[pymodule_export]
    use crate::program::nothing::program_grads_of_nothing;
    #[pymodule_export]
    use crate::program::optimizer_writes::OptimizerWrites;
    #[pymodule_export]
    use crate::program::parts::version_of_copy;
    #[pymodule_export]
    use crate::program::steps::ProgramSteps;
    #[pymodule_export]
    use crate::program::weight::WeightHandle;
    #[pymodule_export]
    use crate::tensor::handed::install_tensors;
    #[pymodule_export]
    use crate::tensor::in_place::plain_arguments;
    #[pymodule_export]
    use crate::tensor::many::{quantize_whole, requantize};
    #[pymodule_export]
    use crate::tensor::scale::{amax, scale_of_amax};
    #[pymodule_export]
    use crate::tensor::stack::stack_values;
    #[pymodule_export]
    use crate::tensor::value::QuantizedValue;
    #[pymodule_export]
    use crate::torch::process::DispatcherCell;
    #[pymodule_export]
    use crate::torch::reader::instance_method;
}

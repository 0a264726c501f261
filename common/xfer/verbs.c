/* verbs.c - what all providers of verbs share. */
#include "common/xfer/verbs.h"

const char *td_vb_wc_status_name(enum td_vb_wc_status status)
{
    static const char *const names[TD_VB_WC_N_STATUSES] = {
        [TD_VB_WC_SUCCESS] = "success", [TD_VB_WC_LOC_LEN] = "local length", [TD_VB_WC_LOC_QP_OP] = "local QP operation",
        [TD_VB_WC_LOC_PROT] = "local protection", [TD_VB_WC_WR_FLUSH] = "flushed", [TD_VB_WC_MW_BIND] = "memory window bind",
        [TD_VB_WC_BAD_RESP] = "bad response", [TD_VB_WC_LOC_ACCESS] = "local access", [TD_VB_WC_REM_INV_REQ] = "remote invalid request",
        [TD_VB_WC_REM_ACCESS] = "remote access", [TD_VB_WC_REM_OP] = "remote operation", [TD_VB_WC_RETRY_EXC] = "transport retries exceeded",
        [TD_VB_WC_RNR_RETRY_EXC] = "receiver not ready retries exceeded", [TD_VB_WC_REM_ABORT] = "remote abort", [TD_VB_WC_FATAL] = "fatal",
        [TD_VB_WC_RESP_TIMEOUT] = "response timeout", [TD_VB_WC_GENERAL] = "general error"};
    const char *name = (unsigned)status < TD_VB_WC_N_STATUSES ? names[status] : 0;
    return name ? name : "unknown";
}
